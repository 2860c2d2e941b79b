-- Files in chunks, under one cap. A part of the scripts that write them.
local FILES, FILES_UNTIL, FILES_BYTES = P .. 'files', P .. 'files:until', P .. 'files:bytes'

-- Files by time: each API key has a list of its own.
local function files_of(owner) return owner == 'all' and FILES or FILES .. ':of:' .. owner end

local function file_key(id) return P .. 'f:' .. id end
local function chunk_key(id, n) return P .. 'f:' .. id .. ':' .. int(n) end

-- What a file takes counts from its first chunk on, whether or not its upload comes to an end.
local function account(id, bytes, expires)
  redis.call('HINCRBY', FILES_BYTES, id, int(bytes))
  redis.call('HINCRBY', FILES_BYTES, 'total', int(bytes))
  redis.call('ZADD', FILES_UNTIL, int(expires), id)
  keep_until(FILES_BYTES, int(expires))
  keep_until(FILES_UNTIL, int(expires))
end

local function unaccount(id)
  redis.call('HINCRBY', FILES_BYTES, 'total', int(0 - tonumber(redis.call('HGET', FILES_BYTES, id) or 0)))
  redis.call('HDEL', FILES_BYTES, id)
  redis.call('ZREM', FILES_UNTIL, id)
  redis.call('ZREM', FILES, id)
end

-- Keys expire by themselves; what they took is given back here.
local function forget_expired_files()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', FILES_UNTIL, '-inf', int(NOW), 'LIMIT', 0, 100)) do unaccount(id) end
end

local function files_total() return tonumber(redis.call('HGET', FILES_BYTES, 'total') or 0) end

-- One expiry for all keys of a file.
local function expire_file(id, at)
  redis.call('HSET', file_key(id), 'expires_at', int(at))
  redis.call('PEXPIREAT', file_key(id), int(at))
  for n = 0, tonumber(redis.call('HGET', file_key(id), 'chunks')) - 1 do redis.call('PEXPIREAT', chunk_key(id, n), int(at)) end
  redis.call('ZADD', FILES_UNTIL, int(at), id)
  local owner = redis.call('HGET', file_key(id), 'key') or 'all'
  for _, shared in ipairs({ files_of(owner), FILES_UNTIL, FILES_BYTES }) do keep_until(shared, int(at)) end
end

local function list_file(id, owner, expires)
  list_in_index(files_of(owner), id, expires, function(old) return redis.call('EXISTS', file_key(old)) == 1 end)
end

-- A line more at the end of a file that a batch writes; the first one makes the file.
local function append_line(id, owner, filename, line, expires)
  local key = file_key(id)
  local f = fields(key, 'chunks')
  if f.chunks == '' then
    redis.call('HSET', key, 'v', version_to_write(), 'id', id, 'filename', filename, 'purpose', 'batch_output', 'bytes', '0', 'chunks', '0',
      'created_at', int(NOW), 'expires_at', int(expires), 'batches', '0', 'key', owner)
    redis.call('PEXPIREAT', key, int(expires))
    list_file(id, owner, expires)
    f.chunks = '0'
  end
  local n = tonumber(f.chunks)
  if n == 0 or redis.call('STRLEN', chunk_key(id, n - 1)) + #line > C.file_chunk then n = n + 1 end
  redis.call('APPEND', chunk_key(id, n - 1), line)
  redis.call('PEXPIREAT', chunk_key(id, n - 1), int(expires))
  redis.call('HSET', key, 'chunks', int(n))
  redis.call('HINCRBY', key, 'bytes', #line)
  account(id, #line, expires)
end
