-- How the jobs or groups in ARGV[3..] stand, for those who wait for them. ARGV[2]: '1' where place and ETA are wanted too.
-- Returns, for each, {status ('' where there is none), tokens in the log, ms until the lease runs out, place in the queue
-- (0: none), '1' where a worker of its pool is ready, ms until its end that can be expected ('': not known)}.
local states = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local j = fields(record_key(id), 'status', 'k', 'lease', 'pool', 'weight')
  local state = { j.status, j.k, '0', '0', '', '' }
  if j.status == '' then
    state = { redis.call('HGET', group_key(id), 'status') or '', '0', '0', '0', '', '' }
  elseif ARGV[2] == '1' then
    local place, eta = outlook_of(id, j)
    state[4], state[6] = int(place or 0), eta and int(eta) or ''
    state[5] = j.status == 'queued' and Q.crew(j.pool).ready and '1' or ''
  end
  if j.status == 'running' then state[3] = int(tonumber(j.lease) - NOW) end
  states[#states + 1] = state
end
return states
