-- The next lines of a batch: the cursor moves on in the same call that accepts their jobs, so that a feeder that runs twice,
-- or two of them, make no second job and leave no line out. ARGV[2]: JSON {id, from (the cursor's line as it was read), line,
-- chunk, offset (where the next line begins), done (it was the last), errors ('' or why the rest cannot be read), items: a
-- list of {line, accept} (a request as for accept, with its number of inputs) or {line, answer} (its error, to be written)};
-- ARGV[3..]: the inputs, in order.
-- Returns ok; moved (the cursor is elsewhere), full (more jobs than the window or the queue has room for), turned (jobs, but the batch
-- is on its way to its end) or over: then nothing was written.
local R = cjson.decode(ARGV[2])
local key = batch_key(R.id)
local b = fields(key, 'status', 'line', 'fed', 'deadline', 'prefix', 'output', 'errors_file', 'key')
if b.fed ~= '' or b.status == 'validating' or b.status == '' then return 'over' end
if b.line ~= R.from then return 'moved' end
local num_jobs, num_sequences, num_tokens = 0, 0, 0
for _, item in ipairs(R.items) do
  if item.accept then
    num_jobs = num_jobs + 1
    num_sequences = num_sequences + #item.accept.seeds
    for _, tokens in ipairs(item.accept.tokens) do num_tokens = num_tokens + tokens end
  end
end
if num_jobs > 0 and b.status ~= 'in_progress' then return 'turned' end
if num_jobs > 0 and redis.call('ZCARD', open_key(R.id)) + num_jobs > C.batch_window then return 'full' end
if num_jobs > 0 then
  -- a line that is larger than the queue has its turn when nothing else waits
  local w = waiting('')
  local over = C.queued_jobs > 0 and w.all_jobs + num_sequences > C.queued_jobs
    or C.queued_tokens > 0 and w.all_tokens + num_tokens > C.queued_tokens
  if over and w.all_jobs > 0 then return 'full' end
end

local next_input = 3
for place, item in ipairs(R.items) do
  if item.accept then
    local request, inputs = item.accept, {}
    for i = 1, #request.seeds do inputs[i] = ARGV[next_input + i - 1] end
    next_input = next_input + #request.seeds
    request.latest = tonumber(b.deadline)
    accept(request, inputs, place)
    redis.call('ZADD', open_key(R.id), item.line, item.line)
  else
    write_answer(R.id, b, 'errors', item.answer)
  end
end
redis.call('PEXPIREAT', open_key(R.id), redis.call('PEXPIRETIME', key))
redis.call('HSET', key, 'line', R.line, 'chunk', R.chunk, 'offset', R.offset)
if R.errors ~= '' then redis.call('HSET', key, 'errors', R.errors, 'ending', 'failed') end
if R.done then redis.call('HSET', key, 'fed', '1') end
settle(R.id)
return 'ok'
