-- An upload has ended: the file is there. ARGV[2]: JSON {id, filename, purpose, bytes, chunks, ttl, idem, body, key}.
-- Returns {verdict, id}: ok; again or conflict (this idempotency key has made a file); lost (a chunk is gone).
local R = cjson.decode(ARGV[2])
if redis.call('EXISTS', file_key(R.id)) == 1 then return { 'ok', R.id } end
local known, id = idempotent(R)
if known then return { known, id } end
for n = 0, R.chunks - 1 do
  if redis.call('EXISTS', chunk_key(R.id, n)) == 0 then return { 'lost', R.id } end
end
local expires = NOW + R.ttl
redis.call('HSET', file_key(R.id), 'v', version_to_write(), 'id', R.id, 'filename', R.filename, 'purpose', R.purpose, 'bytes', int(R.bytes),
  'chunks', int(R.chunks), 'created_at', int(NOW), 'batches', '0', 'key', R.key)
list_file(R.id, R.key, expires)
account(R.id, 0, expires)
expire_file(R.id, expires)
if R.idem ~= '' then
  redis.call('HSET', idem_key(R.idem), 'id', R.id, 'body', R.body)
  redis.call('PEXPIREAT', idem_key(R.idem), int(NOW + math.min(R.ttl, C.idempotency)))
end
return { 'ok', R.id }
