-- The batches as they are now, for those who look on; it writes nothing. ARGV[2]: most riders, ARGV[3]: most of each queue,
-- ARGV[4..]: pools. All riders stand in DUE, and within a lease or a look from now (due_of, the reaper), whatever waits there.
-- Returns {NOW, riders, pools}. A rider is what its record holds, as it is: this runs while others wait. A pool: {how many
-- wait, {id, owner, …} of those that come first, {incarnation, ms, …} with the time for which the last heartbeat of each
-- worker still counts}.
local soon = NOW + math.max(C.lease, C.grace, C.look_again) + 1
local riders, pools = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', int(soon), 'LIMIT', 0, tonumber(ARGV[2]))) do
  local j = redis.call('HMGET', record_key(id), 'status', 'pool', 'key', 'incarnation', 'k', 'weight', 'lease', 'stop')
  if j[1] == 'running' then
    j[1] = id
    riders[#riders + 1] = j
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
return { int(NOW), riders, pools }
