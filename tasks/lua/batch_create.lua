-- Record a batch of requests. ARGV[2]: JSON {id, prefix, file, endpoint, completion_window, window (ms), keep (ms: how long
-- its output stays after its end), metadata, output, errors_file, idem, body, key}.
-- Returns {verdict, id}: ok, again (this id or idempotency key is known), conflict (with another body), no_file, or purpose
-- (that of a file that is not for batches).
local R = cjson.decode(ARGV[2])
local key = batch_key(R.id)
if redis.call('EXISTS', key) == 1 then return { 'again', R.id } end
local known, id = idempotent(R)
if known then return { known, id } end
local f = fields(file_key(R.file), 'purpose', 'expires_at', 'key')
if f.purpose == '' or (f.key ~= '' and f.key or 'all') ~= R.key then return { 'no_file', R.file } end
if f.purpose ~= 'batch' then return { 'purpose', f.purpose } end

local deadline = NOW + R.window
-- every key outlives the last of its jobs, which are kept until their answers are in the output
local expires = deadline + math.max(R.keep, C.retention)
redis.call('HSET', key, 'v', version_to_write(), 'id', R.id, 'prefix', R.prefix, 'file', R.file, 'endpoint', R.endpoint, 'completion_window',
  R.completion_window, 'keep', int(R.keep), 'metadata', R.metadata, 'output', R.output, 'errors_file', R.errors_file,
  'status', 'validating', 'created_at', int(NOW), 'deadline', int(deadline), 'line', '0', 'chunk', '0', 'offset', '0', 'fed', '',
  'ending', '', 'total', '0', 'completed', '0', 'failed', '0', 'key', R.key)
redis.call('PEXPIREAT', key, int(expires))
redis.call('HINCRBY', file_key(R.file), 'batches', 1)
if tonumber(f.expires_at) < expires then expire_file(R.file, expires) end
list_in_index(batches_of(R.key), R.id, expires, function(old) return redis.call('EXISTS', batch_key(old)) == 1 end)
redis.call('ZADD', LIVE, int(NOW), R.id)
keep_until(LIVE, int(expires))
if R.idem ~= '' then
  redis.call('HSET', idem_key(R.idem), 'id', R.id, 'body', R.body)
  redis.call('PEXPIREAT', idem_key(R.idem), int(expires))
end
return { 'ok', R.id }
