-- One owner; attempts bounded. ARGV[2]: JSON {id, nonce, fingerprint, incarnation, worker, pid, board, params: the names of
-- the parameters that the worker knows}. With `board` a job that nothing died with boards in the same call: one round trip
-- less before the child is given the sequence.
-- Returns {verdict, …}: ok with epoch, k, strikes, struck_at, stop, deadline, params, seed, input, default_tokens,
-- boarded, version of the record, trace, created_at, life (with this claim); or gone, ended (with the status), taken, mismatch, newer (with what the worker does not know).
local R = cjson.decode(ARGV[2])
local id, key = R.id, KEYS[1]
local j = fields(key, 'v', 'status', 'epoch', 'owner', 'lease', 'stop', 'k', 'claims', 'claim_k', 'strikes', 'struck_at',
  'boarded', 'fingerprint', 'deadline', 'pool', 'params', 'seed', 'input', 'default_tokens', 'started_at', 'trace', 'created_at',
  'life', 'first', 'worker', 'priority')

local function granted(epoch, strikes, struck_at, stop, boarded, life)
  return { 'ok', epoch, j.k, strikes, struck_at, stop, j.deadline, j.params, j.seed, j.input, j.default_tokens, boarded,
    j.v, j.trace, j.created_at, life }
end

if j.status == '' then return { 'gone' } end
if tonumber(j.v) > C.version then return { 'newer', j.v } end
if j.status ~= 'queued' and j.status ~= 'running' then return { 'ended', j.status } end
-- A newer API may record a parameter that this worker would ignore; one that is null was not asked for.
local known = {}
for _, name in ipairs(R.params) do known[name] = true end
for name, value in pairs(cjson.decode(j.params)) do
  if value ~= cjson.null and not known[name] then return { 'newer', name } end
end
if j.status == 'running' and j.owner == R.nonce then return granted(j.epoch, j.strikes, j.struck_at, j.stop, j.boarded, j.life .. j.first) end
if not (j.status == 'queued' or (tonumber(j.lease) < NOW and past_grace())) then return { 'taken' } end
if j.fingerprint ~= '' and j.k ~= '0' and j.fingerprint ~= R.fingerprint then
  redis.call('ZREM', inv_key(j.pool), id)
  return { 'mismatch' }
end
if j.stop ~= '' then
  terminal_stop(id, j.stop)
  return { 'ended', j.stop }
end
if NOW >= tonumber(j.deadline) then
  terminal_stop(id, 'expired')
  return { 'ended', 'expired' }
end

local claims, struck = 1, j
-- since when it waits: it was accepted, or handed back, or its owner's lease has run out
local since = tonumber(string.match(j.life .. j.first, '(%d+) [^\n]*\n$') or j.created_at)
if j.status == 'running' then
  since = tonumber(j.lease)
  j.life, j.first = with_event(j.life .. j.first, since, 'lost', j.k, j.worker), ''
  redis.call('HSET', key, 'life', j.life, 'first', '') -- what follows may end it
  if j.boarded ~= '' and charge(id, 'its worker died or lost touch') then return { 'ended', 'failed' } end
  struck = fields(key, 'strikes', 'struck_at')
  if j.k == j.claim_k then claims = tonumber(j.claims) + 1 end
end
if claims > C.max_claims then
  terminal(id, 'failed', 'error', error_json('claims_exhausted', string.format('the job was taken up %s times in a row ' ..
    'without one more token: its workers die before it boards. Look at the logs of the workers', int(C.max_claims))), '')
  return { 'ended', 'failed' }
end

local epoch = int(tonumber(j.epoch) + 1)
local lease = NOW + C.lease
local invited = redis.call('ZSCORE', inv_key(j.pool), id) or '0'
local life = with_event(j.life .. j.first, NOW, 'claimed', j.k,
  table.concat({ epoch, invited, int(math.max(0, NOW - since)), R.worker }, ' '))
redis.call('HSET', key, 'status', 'running', 'epoch', epoch, 'owner', R.nonce, 'incarnation', R.incarnation, 'worker', R.worker,
  'lease', int(lease), 'boarded', '', 'died_gen', '', 'claims', int(claims), 'claim_k', j.k, 'fingerprint', R.fingerprint,
  'invites', '0', 'unserved_since', '', 'claimed_at', int(NOW), 'life', life, 'first', '', 'started_at',
  j.started_at ~= '' and j.started_at or int(NOW))
redis.call('HINCRBY', key, 'rides', 1)
if j.started_at == '' then
  note('q ' .. since_accepted(j.created_at, j.priority) .. j.pool)
else
  note((j.status == 'running' and 'r worker_lost ' or 'r handed_back ') .. j.pool)
end
set_due(id, due_of(lease, '', tonumber(j.deadline)), redis.call('PEXPIRETIME', key))
local marker = string.format('{"v":%s,"t":"marker","n":%s,"ids":[],"text":[],"worker":%s}', j.v, j.k, quote(R.worker))
redis.call('XADD', log_key(id), epoch .. '-' .. j.k, 'd', marker)
redis.call('PEXPIREAT', log_key(id), int(redis.call('PEXPIRETIME', key)))
leave_queues(id, j.pool)
publish(id, marker)
celery_record(id, 'STARTED', string.format('{"pid":%s,"hostname":%s}', int(R.pid), quote(R.worker)), false,
  redis.call('PEXPIRETIME', key))
local boarded = ''
if R.board and struck.strikes == '0' then
  boarded = j.k
  redis.call('HSET', key, 'boarded', boarded)
end
return granted(epoch, struck.strikes, struck.struck_at, '', boarded, life)
