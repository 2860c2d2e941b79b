-- How the jobs or groups in ARGV[2..] stand, for those who wait for them. Returns, for each,
-- {status ('' where there is none), tokens in the log, ms until the lease runs out, place in the queue (0: none), '1' where a
-- worker of its pool is ready}.
local states = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local j = fields(record_key(id), 'status', 'k', 'lease', 'pool')
  local state = { j.status, j.k, '0', '0', '' }
  if j.status == '' then
    state = { redis.call('HGET', group_key(id), 'status') or '', '0', '0', '0', '' }
  elseif j.status == 'queued' then
    local rank = redis.call('ZRANK', wait_key(j.pool), id)
    state[4] = rank and int(rank + 1) or '0'
    state[5] = has_worker(j.pool, 'ready') and '1' or ''
  elseif j.status == 'running' then
    state[3] = int(tonumber(j.lease) - NOW)
  end
  states[#states + 1] = state
end
return states
