-- How a batch stands, for who serves it; one whose time is over turns to its end. ARGV[2]: id.
-- Returns {status, ending, file, endpoint, prefix, whose it is, line, chunk, offset, fed, room, line, status of its job, line,
-- status…}: first where the next line begins and how many jobs the queue has room for ('': any number), then the lines whose
-- answers are not written yet.
local id = ARGV[2]
local key = batch_key(id)
local function state()
  return fields(key, 'status', 'ending', 'file', 'endpoint', 'prefix', 'line', 'chunk', 'offset', 'fed', 'deadline', 'key')
end
local b = state()
if b.status == '' then
  redis.call('ZREM', LIVE, id)
  return { 'gone' }
end
if NOW >= tonumber(b.deadline) and (b.status == 'validating' or b.status == 'in_progress') then
  redis.call('HSET', key, 'status', 'finalizing', 'finalizing_at', int(NOW), 'ending', 'expired')
  if b.status == 'validating' then
    redis.call('HSET', key, 'fed', '1')
    settle(id)
  end
  b = state()
end
local answer = { b.status, b.ending, b.file, b.endpoint, b.prefix, b.key ~= '' and b.key or 'all', b.line, b.chunk, b.offset,
  b.fed, '' }
if C.queued_jobs > 0 then answer[11] = int(math.max(0, C.queued_jobs - waiting('').all_jobs)) end
for _, line in ipairs(redis.call('ZRANGE', open_key(id), 0, -1)) do
  local job = b.prefix .. line
  answer[#answer + 1] = line
  answer[#answer + 1] = redis.call('HGET', record_key(job), 'status') or redis.call('HGET', group_key(job), 'status') or 'gone'
end
return answer
