-- The batches as they are now, for those who look on; it writes nothing. ARGV[2]: most riders, ARGV[3]: most of each queue,
-- ARGV[4..]: pools. All riders stand in DUE, and within a lease or a look from now (due_of, the reaper), whatever waits there.
-- Returns {riders, pools}. A rider: {id, pool, owner, incarnation, worker, tokens, weight, ms until its lease runs out,
-- '1' where it is to stop}. A pool: {how many wait, {id, owner, …} of those that come first, {incarnation, ms, …} with the time for
-- which the last heartbeat of each worker still counts}.
local soon = NOW + math.max(C.lease, C.grace, C.look_again) + 1
local riders, pools = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', int(soon), 'LIMIT', 0, tonumber(ARGV[2]))) do
  local j = fields(record_key(id), 'status', 'pool', 'key', 'incarnation', 'worker', 'k', 'weight', 'lease', 'stop')
  if j.status == 'running' then
    riders[#riders + 1] = { id, j.pool, j.key, j.incarnation, j.worker, j.k, j.weight, int(tonumber(j.lease) - NOW),
      j.stop ~= '' and '1' or '' }
  end
end
for i = 4, #ARGV do
  local pool, waiting, heard = ARGV[i], {}, {}
  for _, id in ipairs(redis.call('ZRANGE', wait_key(pool), 0, tonumber(ARGV[3]) - 1)) do
    waiting[#waiting + 1] = id
    waiting[#waiting + 1] = redis.call('HGET', record_key(id), 'key') or ''
  end
  local members = redis.call('ZRANGEBYSCORE', pool_workers_key(pool), int(NOW), '+inf', 'WITHSCORES')
  for m = 1, #members, 2 do
    heard[#heard + 1] = members[m]
    heard[#heard + 1] = int(tonumber(members[m + 1]) - NOW)
  end
  pools[#pools + 1] = { redis.call('ZCARD', wait_key(pool)), waiting, heard }
end
return { riders, pools }
