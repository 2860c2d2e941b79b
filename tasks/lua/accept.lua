-- Accepted means recorded. A group is accepted whole or not at all; a second call with the same ids or idempotency key
-- makes nothing new. ARGV[2]: the request as JSON; ARGV[3..]: the input of each job as JSON, kept verbatim.
-- Returns {verdict, id, account, ids that were invited…}: ok, again (this id or idempotency key is known), conflict (another
-- body), tomb (ended and gone); or, with nothing written, why the queue does not take it (admission.lua), or limited: its key
-- may not. The account is JSON {queue: its numbers, spent: what is left of the key's minute, over: why the key may not}, each
-- null where there is nothing to say, or '' where nothing was decided anew.
local R = cjson.decode(ARGV[2])

local function account(queue, spent, over)
  return string.format('{"queue":%s,"spent":%s,"over":%s}', queue, spent and spent ~= '' and spent or 'null', over or 'null')
end

if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id, '' } end
if R.native ~= '' and redis.call('EXISTS', P .. 'tomb:' .. R.id) == 1 then return { 'tomb', R.id, '' } end
local known, id = idempotent(R)
if known then return { known, id, '' } end

local num_tokens = 0
for _, tokens in ipairs(R.tokens) do num_tokens = num_tokens + tokens end
-- a task sent with plain Celery has waited in the broker, and a slot is free for it
local refused, now_waiting = refusal(R, #R.seeds, num_tokens, first_order(R, 0))
if refused and R.native == '' then return { refused[1], R.id, account(refused[2]) } end

-- last, for it counts what it allows
local over_limit, left = spend(R.key, R.limits, R.counted, #R.seeds)
if over_limit then return { 'limited', R.id, account(numbers_json(now_waiting), left, over_limit) } end

local inputs = {}
for i = 1, #R.seeds do inputs[i] = ARGV[2 + i] end
accept(R, inputs, 0)
if R.webhook ~= '' then promise_webhook(R) end
hold_live(R)
list_in_index(P .. 'jobs:' .. R.key, R.id, redis.call('PEXPIRETIME', R.group and group_key(R.id) or record_key(R.id)), function(old)
  return redis.call('EXISTS', record_key(old), group_key(old)) > 0
end)
-- a pump in the same call: one round trip less before the first token
local answer = R.invite and invite_waiting(R.pool, R.message) or {}
add_waiting(now_waiting, R.pool, #R.seeds, num_tokens)
table.insert(answer, 1, account(numbers_json(now_waiting), left))
table.insert(answer, 1, R.id)
table.insert(answer, 1, 'ok')
return answer
