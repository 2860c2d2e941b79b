-- The whole input was looked at. ARGV[2]: id, ARGV[3]: number of requests in it, ARGV[4]: what is wrong with it as JSON, or ''.
-- Returns the status.
local key = batch_key(ARGV[2])
local b = fields(key, 'id', 'file', 'status')
if b.status ~= 'validating' then return b.status end
if ARGV[4] ~= '' then
  redis.call('HSET', key, 'errors', ARGV[4], 'ending', 'failed', 'fed', '1')
  settle(ARGV[2])
  return 'failed'
end
redis.call('HSET', key, 'status', 'in_progress', 'in_progress_at', int(NOW), 'total', ARGV[3])
return 'in_progress'
