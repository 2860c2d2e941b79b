-- The first stop wins. ARGV[2]: id of a job or a group; ARGV[3]: who asks. Returns the status (ended), requested, or gone.
local function cancel(id)
  local key = record_key(id)
  local j = fields(key, 'status', 'lease', 'stop', 'deadline', 'incarnation', 'k')
  if j.status == '' then return 'gone' end
  if j.status ~= 'queued' and j.status ~= 'running' then return j.status end
  local stop = j.stop ~= '' and j.stop or 'cancelled'
  if j.status == 'queued' or (tonumber(j.lease) < NOW and past_grace()) then
    terminal_stop(id, stop)
    return stop
  end
  if j.stop == '' then note_event(key, 'cancel_asked', j.k, '') end
  redis.call('HSET', key, 'stop', stop)
  set_due(id, tonumber(j.lease), redis.call('PEXPIRETIME', key))
  redis.call('PUBLISH', P .. C.db .. ':o:' .. j.incarnation, id)
  return 'requested'
end

local id = ARGV[2]
if not is_for(ARGV[3], id) then return 'gone' end
local n = redis.call('HGET', group_key(id), 'n')
if not n then return cancel(id) end
local status = redis.call('HGET', group_key(id), 'status')
if status ~= 'queued' then return status end
redis.call('HSET', group_key(id), 'stop', 'cancelled')
local requested = false
for i = 0, tonumber(n) - 1 do
  if cancel(id .. '.' .. int(i)) == 'requested' then requested = true end
end
if requested then return 'requested' end
return redis.call('HGET', group_key(id), 'status')
