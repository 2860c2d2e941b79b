-- A batch: a file of requests whose jobs are accepted a window at a time, and whose answers are written as they end.
-- A part of the scripts of batches. The record holds the cursor in the input: line, chunk, offset are where the next begins.
local BATCHES, LIVE = P .. 'batches', P .. 'batches:live'

-- Batches by time: each API key has a list of its own.
local function batches_of(owner) return owner == 'all' and BATCHES or BATCHES .. ':of:' .. owner end

local function batch_key(id) return P .. 'b:' .. id end
local function open_key(id) return P .. 'b:' .. id .. ':open' end

local function leave(b)
  redis.call('ZREM', LIVE, b.id)
  if redis.call('EXISTS', file_key(b.file)) == 1 then redis.call('HINCRBY', file_key(b.file), 'batches', -1) end
end

-- A batch ends once: when its last line was taken and nothing of it rides. From then on it lives as long as its output.
local function settle(id)
  local key = batch_key(id)
  local b = fields(key, 'id', 'file', 'status', 'fed', 'ending', 'keep', 'output', 'errors_file', 'finalizing_at', 'key')
  if b.fed ~= '1' or redis.call('ZCARD', open_key(id)) > 0 then return end
  local status = b.ending ~= '' and b.ending or 'completed'
  redis.call('HSET', key, 'status', status, status .. '_at', int(NOW))
  if b.finalizing_at == '' and status == 'completed' then redis.call('HSET', key, 'finalizing_at', int(NOW)) end
  local expires = NOW + tonumber(b.keep)
  redis.call('PEXPIREAT', key, int(expires))
  keep_until(batches_of(b.key ~= '' and b.key or 'all'), int(expires))
  for _, file in ipairs({ b.output, b.errors_file }) do
    if redis.call('EXISTS', file_key(file)) == 1 then
      redis.call('HSET', file_key(file), 'batches', '0')
      expire_file(file, expires)
    end
  end
  leave(b)
end

-- One answer, into the output or the errors, which belong to whom the batch does. b: its output, errors_file and key.
local function write_answer(id, b, kind, line)
  local good = kind == 'output'
  local expires = redis.call('PEXPIRETIME', batch_key(id))
  local file = good and b.output or b.errors_file
  append_line(file, b.key ~= '' and b.key or 'all', id .. '_' .. kind .. '.jsonl', line, expires)
  redis.call('HSET', file_key(file), 'batches', '1')
  redis.call('HINCRBY', batch_key(id), good and 'completed' or 'failed', 1)
end
