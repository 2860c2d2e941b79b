-- Answers of lines whose jobs have ended, each written once. ARGV[2]: id; then three a line: its number, output or errors, the
-- answer. A line whose job has not ended stays open: Redis may have lost the end that this answer was made of.
-- Returns how many were written.
local id = ARGV[2]
local b = fields(batch_key(id), 'prefix', 'output', 'errors_file', 'key')
local num_written = 0
for a = 3, #ARGV, 3 do
  local line, job = ARGV[a], b.prefix .. ARGV[a]
  local group = redis.call('HGET', group_key(job), 'n')
  local status = redis.call('HGET', group and group_key(job) or record_key(job), 'status')
  if status ~= 'queued' and status ~= 'running' and redis.call('ZREM', open_key(id), line) == 1 then
    write_answer(id, b, ARGV[a + 1], ARGV[a + 2])
    -- from now on it is kept like any job
    local at = int(NOW + C.retention)
    if group then
      redis.call('PEXPIREAT', group_key(job), at)
      redis.call('PEXPIREAT', celery_key(job), at)
      for i = 0, tonumber(group) - 1 do expire_job(job .. '.' .. int(i), at) end
    else
      expire_job(job, at)
    end
    num_written = num_written + 1
  end
end
settle(id)
return num_written
