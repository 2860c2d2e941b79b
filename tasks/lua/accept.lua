-- Accepted means recorded. A group is accepted whole or not at all; a second call with the same ids or idempotency key
-- makes nothing new. ARGV[2]: the request as JSON; ARGV[3..]: the input of each job as JSON, kept verbatim.
-- Returns {verdict, id, ids that were invited…}: ok, again (this id or idempotency key is known), conflict (another body), tomb (ended and gone).
local R = cjson.decode(ARGV[2])

if redis.call('EXISTS', record_key(R.id), group_key(R.id)) > 0 then return { 'again', R.id } end
if R.native ~= '' and redis.call('EXISTS', P .. 'tomb:' .. R.id) == 1 then return { 'tomb', R.id } end
if R.idem ~= '' then
  local known = fields(idem_key(R.idem), 'id', 'body')
  if known.id ~= '' then return { known.body == R.body and 'again' or 'conflict', known.id } end
end

local deadline = NOW + R.deadline
local expires = int(deadline + kept_for(R.idem))
local version = version_to_write()

local function record(id, i, group)
  redis.call('HSET', record_key(id), 'v', version, 'id', id, 'status', 'queued', 'epoch', '0', 'owner', '', 'lease', '0', 'stop', '',
    'k', '0', 'claims', '0', 'claim_k', '0', 'strikes', '0', 'deaths', '0', 'struck_at', '-1', 'boarded', '', 'died_gen', '',
    'params', R.params, 'seed', R.seeds[i], 'input', ARGV[2 + i], 'fingerprint', '', 'pool', R.pool, 'model', R.model,
    'deadline', int(deadline), 'created_at', int(NOW), 'order', int(NOW_US + i), 'group', group, 'idem',
    group == '' and R.idem or '', 'native', R.native, 'metadata', group == '' and R.metadata or '', 'default_tokens',
    R.default_tokens, 'user', R.user, 'request', group == '' and R.request or '')
  redis.call('SET', text_key(id), '')
  redis.call('PEXPIREAT', record_key(id), expires)
  redis.call('PEXPIREAT', text_key(id), expires)
  redis.call('ZADD', wait_key(R.pool), int(NOW_US + i), id)
  set_due(id, deadline, tonumber(expires))
end

if R.group then
  redis.call('HSET', group_key(R.id), 'v', version, 'id', R.id, 'status', 'queued', 'n', int(#R.seeds), 'left', int(#R.seeds),
    'model', R.model, 'pool', R.pool, 'seed', R.seed, 'created_at', int(NOW), 'deadline', int(deadline), 'idem', R.idem,
    'metadata', R.metadata, 'request', R.request or '')
  redis.call('PEXPIREAT', group_key(R.id), expires)
  for i = 1, #R.seeds do record(R.id .. '.' .. int(i - 1), i, R.id) end
else
  record(R.id, 1, '')
end

if R.idem ~= '' then
  redis.call('HSET', idem_key(R.idem), 'id', R.id, 'body', R.body)
  redis.call('PEXPIREAT', idem_key(R.idem), expires)
end
keep_until(wait_key(R.pool), expires)
local index = P .. 'jobs:' .. R.key
redis.call('ZADD', index, int(NOW_US), R.id)
keep_until(index, expires)
-- the index forgets what has expired, a little with each new job
for _, old in ipairs(redis.call('ZRANGE', index, 0, 1)) do
  if redis.call('EXISTS', record_key(old), group_key(old)) == 0 then redis.call('ZREM', index, old) end
end
-- a pump in the same call: one round trip less before the first token
local answer = R.invite and invite_waiting(R.pool, R.message) or {}
table.insert(answer, 1, R.id)
table.insert(answer, 1, 'ok')
return answer
