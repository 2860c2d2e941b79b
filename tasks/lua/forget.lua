-- Delete an ended job or group with all its keys. ARGV[2]: id, ARGV[3]: who asks, and has it in the list.
-- Returns forgotten, gone, riding (it has not ended), child (it is a part of a group), open (it is a line of a batch, and
-- its answer is not written yet).
local id = ARGV[2]

if not is_for(ARGV[3], id) then return 'gone' end

local function forget(job)
  redis.call('DEL', record_key(job), log_key(job), text_key(job), P .. 'att:' .. job, 'celery-task-meta-' .. job)
end

local g = fields(group_key(id), 'status', 'n', 'idem', 'batch')
local j = fields(KEYS[1], 'status', 'group', 'idem', 'batch')
local idem
local batch = g.batch .. j.batch
if batch ~= '' and redis.call('ZSCORE', P .. 'b:' .. batch .. ':open', string.match(id, '%d+$')) then return 'open' end
if g.status ~= '' then
  if g.status == 'queued' then return 'riding' end
  for i = 0, tonumber(g.n) - 1 do forget(id .. '.' .. int(i)) end
  redis.call('DEL', group_key(id))
  idem = g.idem
elseif j.status == '' then
  return 'gone'
elseif j.group ~= '' then
  return 'child'
elseif j.status == 'queued' or j.status == 'running' then
  return 'riding'
else
  idem = j.idem
end
forget(id)
redis.call('ZREM', HOOKS, id) -- what is not delivered is given up with the job
if idem ~= '' and redis.call('HGET', idem_key(idem), 'id') == id then redis.call('DEL', idem_key(idem)) end
redis.call('ZREM', P .. 'jobs:' .. ARGV[3], id)
return 'forgotten'
