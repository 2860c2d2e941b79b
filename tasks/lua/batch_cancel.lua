-- No further line is taken, and those that ride are to stop; who serves the batch sees to both. ARGV[2]: id, ARGV[3]:
-- who asks.
-- Returns the status, or gone.
local id = ARGV[2]
local key = batch_key(id)
local b = fields(key, 'status', 'key')
if b.status == '' or (ARGV[3] ~= '' and (b.key ~= '' and b.key or 'all') ~= ARGV[3]) then return 'gone' end
if b.status == 'validating' or b.status == 'in_progress' then
  redis.call('HSET', key, 'status', 'cancelling', 'cancelling_at', int(NOW), 'ending', 'cancelled')
  if b.status == 'validating' then
    redis.call('HSET', key, 'fed', '1')
    settle(id)
  end
  tell_batch(id, version_to_write(), 'cancelling')
  return redis.call('HGET', key, 'status')
end
return b.status
