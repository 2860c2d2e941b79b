-- Accepted means recorded. A group is accepted whole or not at all; a second call with the same ids or idempotency key
-- makes nothing new. ARGV[2]: the request as JSON; ARGV[3..]: the input of each job as JSON, kept verbatim.
-- Returns {verdict, id, numbers, ids that were invited…}: ok, again (this id or idempotency key is known), conflict (another
-- body), tomb (ended and gone), or why it is refused (admission.lua); then nothing was written.
local R = cjson.decode(ARGV[2])

if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id, '' } end
if R.native ~= '' and redis.call('EXISTS', P .. 'tomb:' .. R.id) == 1 then return { 'tomb', R.id, '' } end
local known, id = idempotent(R)
if known then return { known, id, '' } end

local num_tokens = 0
for _, tokens in ipairs(R.tokens) do num_tokens = num_tokens + tokens end
-- a task sent with plain Celery has waited in the broker, and a slot is free for it
local refused, now_waiting = refusal(R, #R.seeds, num_tokens, first_order(R, 0))
if refused and R.native == '' then return { refused[1], R.id, refused[2] } end

local inputs = {}
for i = 1, #R.seeds do inputs[i] = ARGV[2 + i] end
accept(R, inputs, 0)
list_in_index(P .. 'jobs:' .. R.key, R.id, redis.call('PEXPIRETIME', R.group and group_key(R.id) or record_key(R.id)), function(old)
  return redis.call('EXISTS', record_key(old), group_key(old)) > 0
end)
-- a pump in the same call: one round trip less before the first token
local answer = R.invite and invite_waiting(R.pool, R.message) or {}
for name, more in pairs({ jobs = #R.seeds, own_jobs = #R.seeds, tokens = num_tokens, own_tokens = num_tokens }) do
  now_waiting[name] = now_waiting[name] + more
end
table.insert(answer, 1, numbers_json(now_waiting, nil, Q.drain_ms(R.pool)))
table.insert(answer, 1, R.id)
table.insert(answer, 1, 'ok')
return answer
