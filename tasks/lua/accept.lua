-- Accepted means recorded. A group is accepted whole or not at all; a second call with the same ids or idempotency key
-- makes nothing new. ARGV[2]: the request as JSON; ARGV[3..]: the input of each job as JSON, kept verbatim.
-- Returns {verdict, id, what is left of the key's minute, ids that were invited…}: ok, again (this id or idempotency key is
-- known), conflict (another body), tomb (ended and gone), limited (the key may not: why, as JSON, and what is left).
local R = cjson.decode(ARGV[2])

if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id } end
if R.native ~= '' and redis.call('EXISTS', P .. 'tomb:' .. R.id) == 1 then return { 'tomb', R.id } end
local known, id = idempotent(R)
if known then return { known, id } end

local refused, left = spend(R.key, R.limits, R.counted, #R.seeds)
if refused then return { 'limited', R.id, left, refused } end

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
table.insert(answer, 1, left)
table.insert(answer, 1, R.id)
table.insert(answer, 1, 'ok')
return answer
