-- Shared by every script of the ledger; tasks/ledger.py puts it before each of them. docs/protocol.md explains it.
-- ARGV[1] is the configuration as JSON, KEYS are the records (hashes) of the jobs that the call speaks of. Every other
-- key is derived from a record, so that only one who holds the record touches them; all share the tag {carpool}.
-- Times are milliseconds of this server's clock. Each script is right when it runs twice: clients resend after a lost reply.
local C = cjson.decode(ARGV[1])
local P = '{carpool}:'
local TIME = redis.call('TIME')
-- a test may stand in for the clock; tasks/calls.py never does
if C.clock then TIME = { math.floor(C.clock / 1000), C.clock % 1000 * 1000 } end
local NOW = tonumber(TIME[1]) * 1000 + math.floor(tonumber(TIME[2]) / 1000)
local NOW_US = tonumber(TIME[1]) * 1000000 + tonumber(TIME[2])

-- Added to nothing, for -0 would be written "-0", which is no integer to the server.
local function int(x) return string.format('%.0f', x + 0) end
local function quote(s) return cjson.encode(s or '') end
local function quote_or_null(s) if not s or s == '' then return 'null' end return cjson.encode(s) end
local function number_or_null(s) if not s or s == '' then return 'null' end return s end
local function seconds_or_null(ms) if not ms or ms == '' then return 'null' end return string.format('%.3f', tonumber(ms) / 1000) end

local function record_key(id) return P .. 'j:' .. id end
local function log_key(id) return P .. 'l:' .. id end
local function text_key(id) return P .. 't:' .. id end
local function group_key(id) return P .. 'g:' .. id end
local function idem_key(hash) return P .. 'idem:' .. hash end
local function wait_key(pool) return P .. 'wait:' .. pool end
local function inv_key(pool) return P .. 'inv:' .. pool end
local function lost_key(pool) return P .. 'lost:' .. pool end
local function pool_workers_key(pool) return P .. 'ws:' .. pool end
local function worker_key(incarnation) return P .. 'w:' .. incarnation end
local function queue_key(pool) return 'carpool.' .. pool end
local function celery_key(id) return 'celery-task-meta-' .. id end
local function event_id(id) return 'evt_' .. id end
local function minute_key(key) return P .. 'minute:' .. key end
local function live_key(key) return P .. 'live:' .. key end
local function counted_key(pool) return P .. 'counted:' .. pool end
local DUE = P .. 'due'
local SCHEMA = P .. 'schema'
local HOOKS = P .. 'hook'
local SEEN = P .. 'seen'
-- Tokens in all logs, by pool: apart from what else is counted, for it grows with every step.
local GENERATED = P .. 'generated'
-- What nothing was counted of for so long is forgotten, and begins anew.
local COUNTED_KEPT_MS = 30 * 86400000
-- What waits, whose turn it is, how long that takes: queue.lua, shares.lua and rates.lua, which stand behind this part.
local Q = {}

local function publish(id, data) redis.call('PUBLISH', P .. C.db .. ':c:' .. id, data) end

-- Some fields of a hash as a table; a missing field is ''.
local function fields(key, ...)
  local values = redis.call('HMGET', key, ...)
  local result = {}
  for i, name in ipairs({...}) do result[name] = values[i] or '' end
  return result
end

-- A key shared by many jobs lives as long as the longest of them: mostly it does already.
local function keep_until(key, at)
  if redis.call('PEXPIRETIME', key) < tonumber(at) then redis.call('PEXPIREAT', key, at) end
end

-- What happened to a job, for its timeline (tasks/life.py reads it): a line an event, `<ms> <event> <tokens> <detail>`.
-- It is bounded: of a long one the first event and the last stay. `first` is the line of the latest first token, apart for as
-- long as nothing follows it: that a step should have to read nothing.
local LIFE_MOST = 2048
local function with_event(life, at, event, k, detail)
  if #life > LIFE_MOST then
    local first = string.find(life, '\n', 1, true)
    local rest = string.find(life, '\n', #life - LIFE_MOST / 2, true)
    life = string.sub(life, 1, first) .. '0 omitted 0 \n' .. string.sub(life, rest + 1)
  end
  detail = string.gsub(detail, '%c', ' ')
  -- cut between characters of UTF-8
  if #detail > 200 then detail = string.gsub(string.sub(detail, 1, 200), '[\192-\255]?[\128-\191]*$', '') end
  return table.concat({ life, int(at), ' ', event, ' ', k, ' ', detail, '\n' })
end

local function note_event(key, event, k, detail)
  local r = fields(key, 'life', 'first')
  redis.call('HSET', key, 'life', with_event(r.life .. r.first, NOW, event, k, detail), 'first', '')
end

-- Has this idempotency key made something already? Returns again or conflict (with another body), and its id.
local function idempotent(R)
  if R.idem == '' then return end
  local known = fields(idem_key(R.idem), 'id', 'body')
  if known.id ~= '' then return known.body == R.body and 'again' or 'conflict', known.id end
end

-- A list by time of what was made. It forgets what has expired, a little with each that is new.
local function list_in_index(index, id, expires, exists)
  redis.call('ZADD', index, int(NOW_US), id)
  keep_until(index, int(expires))
  for _, old in ipairs(redis.call('ZRANGE', index, 0, 1)) do
    if not exists(old) then redis.call('ZREM', index, old) end
  end
end

local function set_due(id, at, expires)
  redis.call('ZADD', DUE, int(at), id)
  keep_until(DUE, int(expires))
end

local function expire_job(id, at)
  redis.call('PEXPIREAT', record_key(id), at)
  redis.call('PEXPIREAT', log_key(id), at)
  redis.call('PEXPIREAT', text_key(id), at)
  redis.call('PEXPIREAT', celery_key(id), at)
end

-- How long a job is kept after its end. An idempotency key lives as long as its record, and the record as long as the
-- key is promised to be remembered.
local function kept_for(idem) return idem ~= '' and math.max(C.retention, C.idempotency) or C.retention end

-- A job with a webhook is kept for as long as its event may be on its way, and an hour more.
local function kept_after_end(idem, webhook)
  return webhook ~= '' and math.max(kept_for(idem), C.hook_span + 3600000) or kept_for(idem)
end

-- `due` is always: the deadline while queued; the lease while running with a stop or a passed deadline; else the earlier.
-- A queued job that has tokens is looked at now and then besides: does anybody still serve its model?
local function due_in_queue(k, deadline)
  return k == '0' and deadline or math.min(deadline, NOW + C.look_again)
end

local function due_of(lease, stop, deadline)
  if stop ~= '' or NOW >= deadline then return lease end
  return math.min(lease, deadline)
end

-- After an outage all leases look run out: for one grace nobody takes a leased job, and none before the reaper ticks again.
local function past_grace()
  local tick = tonumber(redis.call('GET', P .. 'tick') or 0)
  local grace = tonumber(redis.call('GET', P .. 'grace') or 0)
  return NOW > grace and NOW - tick < C.tick_stale
end

-- The version that new records get: the oldest that a living process reads (agree.lua). A job's log has its record's version.
local function version_to_write()
  return int(math.min(C.version, tonumber(redis.call('GET', SCHEMA) or C.version)))
end

-- Whose a job or a group is: the id of an API key, or 'all' where it was made without one.
local function owner_of(id)
  local key = redis.call('HGET', record_key(id), 'key') or redis.call('HGET', group_key(id), 'key') or ''
  return key ~= '' and key or 'all'
end

-- Is it there for who asks? '' is Carpool itself.
local function is_for(owner, id) return owner == '' or owner_of(id) == owner end

-- A job of an API key has ended: it is none of those that the key has at once, and the tokens that it was counted with and
-- has not used are given back, for as long as the second in which they were counted is within the minute (key_limits.lua).
local function leave_key(id, j)
  if j.key == '' or j.key == 'all' then return end
  redis.call('ZREM', live_key(j.key), id)
  if j.counted == '' then return end
  local second = int(math.floor(tonumber(j.created_at) / 1000))
  local requests, tokens = string.match(redis.call('HGET', minute_key(j.key), second) or '', '^(%d+) (%d+)$')
  if not requests then return end
  local used = tonumber(j.prompt_tokens == '' and 0 or j.prompt_tokens) + tonumber(j.k)
  redis.call('HSET', minute_key(j.key), second, requests .. ' ' .. int(math.max(0, tokens + used - tonumber(j.counted))))
end

local function leave_queues(id, pool)
  redis.call('ZREM', wait_key(pool), id)
  redis.call('ZREM', inv_key(pool), id)
  Q.leave(id, pool)
end

-- Date and time of NOW in ISO 8601, for Celery's records. Civil-from-days as in Howard Hinnant's date algorithms.
local function iso_now()
  local days = math.floor(NOW / 86400000)
  local ms = NOW - days * 86400000
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local day = doy - math.floor((153 * mp + 2) / 5) + 1
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03d000+00:00', year, month, day, math.floor(ms / 3600000),
    math.floor(ms / 60000) % 60, math.floor(ms / 1000) % 60, ms % 1000)
end

-- As OpenAI says it; the details only where a cache had tokens of the prompt.
local function usage_json(prompt_tokens, k, cached)
  if prompt_tokens == '' then
    return string.format('{"prompt_tokens":null,"completion_tokens":%s,"total_tokens":null}', k)
  end
  local details = ''
  if cached ~= '' and cached ~= '0' then details = string.format(',"prompt_tokens_details":{"cached_tokens":%s}', cached) end
  return string.format('{"prompt_tokens":%s,"completion_tokens":%s,"total_tokens":%s%s}', prompt_tokens, k,
    int(tonumber(prompt_tokens) + tonumber(k)), details)
end

local function urls_json(id)
  return string.format('{"self":"/jobs/%s","stream":"/jobs/%s/stream","cancel":"/jobs/%s/cancel"}', id, id, id)
end

-- What is shown of a job's webhook, as JSON: where its event goes (a query may hold a secret of its receiver), how that
-- stands, and the last attempts. `hook_<n>` is the n-th attempt (webhooks.lua).
local ATTEMPTS_SHOWN = 50
local function webhook_json(id, has_ended)
  local key = record_key(id)
  local h = fields(key, 'webhook', 'hook', 'hook_n', 'hook_next', 'finished_at')
  if h.webhook == '' then return 'null' end
  local last = tonumber(h.hook_n == '' and 0 or h.hook_n)
  local attempts = {}
  for n = math.max(1, last - ATTEMPTS_SHOWN + 1), last do
    attempts[#attempts + 1] = redis.call('HGET', key, 'hook_' .. int(n)) or nil
  end
  local status = not has_ended and 'waiting' or (h.hook ~= '' and h.hook or 'pending')
  local next_at = status == 'pending' and (h.hook_next ~= '' and h.hook_next or h.finished_at) or ''
  return table.concat({ '{"url":', quote((h.webhook:gsub('%?.*$', '?…'))), ',"event_id":', quote(event_id(id)), ',"status":',
    quote(status), ',"attempts":[', table.concat(attempts, ','), '],"next_attempt_at":', seconds_or_null(next_at), '}' })
end

local function int_or_null(n) return n and int(n) or 'null' end
local function eta_json(ms) return ms and string.format('%.1f', ms / 1000) or 'null' end

-- Place in the queue and ms until the end that can be expected, each nil where there is none. `j`: status, pool, weight, k, lease.
local function outlook_of(id, j)
  if j.status == 'queued' then return Q.outlook(j.pool, id, j.weight) end
  if j.status == 'running' and tonumber(j.lease) >= NOW then return nil, Q.riding_eta_ms(j.pool, j.weight, tonumber(j.k)) end
end

-- The object of GET /jobs/{id} for one job, as JSON; false where there is no record.
local function job_view(id)
  local j = fields(record_key(id), 'status', 'model', 'seed', 'created_at', 'started_at', 'finished_at', 'rides', 'k',
    'finish_reason', 'prompt_tokens', 'error', 'stop', 'pool', 'metadata', 'group', 'deadline', 'deaths', 'priority', 'webhook',
    'weight', 'lease', 'cached_tokens')
  if j.status == '' then return false end
  local place, eta = outlook_of(id, j)
  return table.concat({
    '{"id":', quote(id), ',"object":"job","status":', quote(j.status), ',"model":', quote(j.model), ',"seed":', j.seed,
    ',"created_at":', seconds_or_null(j.created_at), ',"started_at":', seconds_or_null(j.started_at),
    ',"finished_at":', seconds_or_null(j.finished_at), ',"deadline_at":', seconds_or_null(j.deadline),
    ',"priority":', j.priority == '' and '5' or j.priority,
    ',"queue_position":', int_or_null(place), ',"eta_s":', eta_json(eta), ',"attempts":', j.rides == '' and '0' or j.rides,
    ',"cancel_requested":', j.stop == 'cancelled' and 'true' or 'false',
    ',"text":', quote(redis.call('GET', text_key(id)) or ''), ',"finish_reason":', quote_or_null(j.finish_reason),
    ',"usage":', usage_json(j.prompt_tokens, j.k, j.cached_tokens), ',"error":', number_or_null(j.error),
    ',"metadata":', number_or_null(j.metadata), ',"group":', quote_or_null(j.group), ',"webhook":',
    j.webhook == '' and 'null' or webhook_json(id, j.status ~= 'queued' and j.status ~= 'running'), ',"urls":', urls_json(id), '}'
  })
end

-- The same for a group: its own state, and the ids and texts of its children, in order.
local function group_view(id)
  local g = fields(group_key(id), 'status', 'model', 'seed', 'created_at', 'started_at', 'finished_at', 'n', 'left', 'metadata',
    'error', 'deadline', 'finish_reason', 'stop', 'priority')
  if g.status == '' then return false end
  local children, texts, prompt_tokens, cached, tokens, started, riding = {}, {}, 0, 0, 0, '', 0
  local place, eta, last
  for i = 0, tonumber(g.n) - 1 do
    local child = id .. '.' .. int(i)
    local c = fields(record_key(child), 'status', 'prompt_tokens', 'k', 'started_at', 'rides', 'pool', 'weight', 'lease',
      'cached_tokens')
    if c.status == 'running' then
      local _, ms = outlook_of(child, c)
      eta = ms and math.max(ms, eta or 0) or eta
    elseif c.status == 'queued' then
      -- it waits until its first child rides, and ends with its last
      place = place or (outlook_of(child, c))
      last = { child, c }
    end
    children[#children + 1] = quote(child)
    texts[#texts + 1] = quote(redis.call('GET', text_key(child)) or '')
    prompt_tokens = prompt_tokens + tonumber(c.prompt_tokens == '' and 0 or c.prompt_tokens)
    cached = cached + tonumber(c.cached_tokens == '' and 0 or c.cached_tokens)
    tokens = tokens + tonumber(c.k == '' and 0 or c.k)
    riding = math.max(riding, tonumber(c.rides == '' and 0 or c.rides))
    if c.started_at ~= '' and (started == '' or tonumber(c.started_at) < tonumber(started)) then started = c.started_at end
  end
  local status = g.status
  if last then eta = select(2, outlook_of(last[1], last[2])) end
  if status == 'queued' and started ~= '' then status, place = 'running', nil end
  return table.concat({
    '{"id":', quote(id), ',"object":"job","status":', quote(status), ',"model":', quote(g.model), ',"seed":', g.seed,
    ',"created_at":', seconds_or_null(g.created_at), ',"started_at":', seconds_or_null(started),
    ',"finished_at":', seconds_or_null(g.finished_at), ',"deadline_at":', seconds_or_null(g.deadline),
    ',"priority":', g.priority == '' and '5' or g.priority,
    ',"queue_position":', int_or_null(place), ',"eta_s":', eta_json(eta), ',"attempts":', int(riding),
    ',"cancel_requested":', g.stop == 'cancelled' and 'true' or 'false',
    ',"text":null,"texts":[', table.concat(texts, ','), '],"children":[', table.concat(children, ','),
    '],"finish_reason":', quote_or_null(g.finish_reason), ',"usage":', usage_json(int(prompt_tokens), int(tokens), int(cached)),
    ',"error":', number_or_null(g.error), ',"metadata":', number_or_null(g.metadata), ',"group":null,"webhook":null,"urls":', urls_json(id), '}'
  })
end

-- An error that a script itself finds; those of workers come as JSON from tasks/codes.py.
local function error_json(code, message)
  local kind = code == 'cancelled' and 'cancelled' or 'server_error'
  return string.format('{"message":%s,"type":%s,"param":null,"code":%s}', quote(message), quote(kind), quote(code))
end

local CELERY_STATE = { succeeded = 'SUCCESS', failed = 'FAILURE', cancelled = 'REVOKED', expired = 'FAILURE' }

-- Celery's own record of the result, as its Redis backend writes it (SETEX and PUBLISH): never through
-- backend.store_result, which no fence guards.
local function celery_record(id, state, result, done, expires)
  local key = celery_key(id)
  local data = string.format('{"status":"%s","result":%s,"traceback":null,"children":[],"date_done":%s,"task_id":%s}',
    state, result, done and quote(iso_now()) or 'null', quote(id))
  redis.call('SET', key, data, 'PXAT', int(expires))
  redis.call('PUBLISH', key, data)
end

local function celery_end(id, status, view, reason, expires)
  local result = view
  if status == 'cancelled' then
    result = '{"exc_type":"TaskRevokedError","exc_message":["cancelled"],"exc_module":"celery.exceptions"}'
  elseif status ~= 'succeeded' then
    result = string.format('{"exc_type":"JobFailed","exc_message":[%s,%s,%s],"exc_module":"tasks.codes"}', quote(reason.message),
      quote(reason.code), quote(id))
  end
  celery_record(id, CELERY_STATE[status], result, true, expires)
end

local function reason_of(error) return error ~= '' and cjson.decode(error) or {} end

local RANK = { succeeded = 0, expired = 1, cancelled = 2, failed = 3 }

-- Who fills a batch's output is told that one of its lines has ended.
local function tell_batch(batch, version, status)
  if batch == '' then return end
  publish(batch, string.format('{"v":%s,"t":"end","n":0,"ids":[],"text":[],"status":%s}', version, quote(status)))
end

-- One child of a group has ended. The last one ends the group: failed > cancelled > expired > succeeded.
local function group_child_ended(group, child, status, error)
  local key = group_key(group)
  local g = fields(key, 'v', 'worst', 'idem', 'n', 'batch')
  if g.n == '' then return end
  if g.worst == '' or RANK[status] > RANK[g.worst] then
    redis.call('HSET', key, 'worst', status, 'error', error, 'culprit', child)
    g.worst = status
  end
  if redis.call('HINCRBY', key, 'left', -1) > 0 then return end
  redis.call('HSET', key, 'status', g.worst, 'finished_at', int(NOW))
  -- a line of a batch stays until its answer is in the batch's output
  local at = int(g.batch ~= '' and redis.call('PEXPIRETIME', key) or NOW + kept_for(g.idem))
  celery_end(group, g.worst, group_view(group), reason_of(redis.call('HGET', key, 'error') or ''), at)
  publish(group, string.format('{"v":%s,"t":"end","n":0,"ids":[],"text":[],"status":%s}', g.v, quote(g.worst)))
  redis.call('PEXPIREAT', key, at)
  if g.idem ~= '' then redis.call('PEXPIREAT', idem_key(g.idem), at) end
  for i = 0, tonumber(g.n) - 1 do expire_job(group .. '.' .. int(i), at) end
  tell_batch(g.batch, g.v, g.worst)
end

-- The outbox: every job whose webhook is not delivered stands in HOOKS, with the time when somebody has to look at it next.
-- A live one is there as well, so that an end that a process wrote which knows of no webhooks is found all the same.
local function into_outbox(id, at, expires)
  redis.call('ZADD', HOOKS, int(at), id)
  keep_until(HOOKS, int(expires))
end

-- Something happened to a job that the metrics count. One line, and one command, in the script that makes it happen: so it
-- is counted once, whoever dies and whatever is sent again. tally.lua sums the lines up; the pool comes last, for it may be
-- any text. Nobody has to be there to do so: what is left alone for a day is forgotten.
local function note(line)
  if redis.call('RPUSH', SEEN, line) == 1 then redis.call('PEXPIRE', SEEN, 86400000) end
end

-- A job's priority and the ms since it was accepted, as a line has them.
local function since_accepted(created_at, priority)
  return (priority == '' and '5' or priority) .. ' ' .. math.max(0, NOW - (tonumber(created_at) or NOW)) .. ' '
end

-- Exactly one end, and it is the last entry of the log. Its own epoch refuses late writers by entry id as well.
-- Returns false where the job has already ended or is gone.
local function terminal(id, status, finish_reason, error, tail)
  local key = record_key(id)
  local j = fields(key, 'v', 'status', 'epoch', 'k', 'pool', 'group', 'native', 'idem', 'prompt_tokens', 'batch', 'key',
    'counted', 'created_at', 'webhook', 'weight', 'charged', 'rides', 'claim_k', 'claimed_at', 'cached_tokens', 'priority')
  if j.status ~= 'queued' and j.status ~= 'running' then return false end
  local reason = reason_of(error) -- before anything is written: there is no rollback
  local epoch = int(tonumber(j.epoch) + 1)
  local data = string.format(
    '{"v":%s,"t":"end","n":%s,"ids":[],"text":[%s],"status":%s,"finish_reason":%s,"usage":%s,"error":%s}', j.v, j.k,
    quote(tail), quote(status), quote(finish_reason), usage_json(j.prompt_tokens, j.k, j.cached_tokens), number_or_null(error))
  redis.call('XADD', log_key(id), epoch .. '-' .. j.k, 'd', data)
  if tail ~= '' then redis.call('APPEND', text_key(id), tail) end
  redis.call('HSET', key, 'status', status, 'epoch', epoch, 'lease', '0', 'finished_at', int(NOW), 'finish_reason', finish_reason,
    'error', error)
  leave_queues(id, j.pool)
  redis.call('ZREM', DUE, id)
  leave_key(id, j)
  Q.settle(j.pool, j)
  if status == 'succeeded' then Q.measure(j.pool, j) end
  local how = status == 'succeeded' and finish_reason or reason.code
  note('e ' .. status .. ' ' .. (how and string.match(how, '^[%w_]+$') or 'other') .. ' ' .. since_accepted(j.created_at, j.priority)
    .. (j.prompt_tokens == '' and '0' or j.prompt_tokens) .. ' ' .. (j.cached_tokens == '' and '0' or j.cached_tokens) .. ' ' .. j.k .. ' ' .. j.pool)
  publish(id, data)
  -- the children of a group stay until the group has ended, so that its texts are whole, and a line of a batch until its
  -- answer is in the batch's output
  local at = int((j.group ~= '' or j.batch ~= '') and redis.call('PEXPIRETIME', key) or NOW + kept_after_end(j.idem, j.webhook))
  celery_end(id, status, job_view(id), reason, at)
  expire_job(id, at)
  if j.native ~= '' then redis.call('SET', P .. 'tomb:' .. id, '1', 'PX', int(C.tombstone)) end
  if j.group ~= '' then
    group_child_ended(j.group, id, status, error)
  elseif j.idem ~= '' then
    redis.call('PEXPIREAT', idem_key(j.idem), at)
  end
  tell_batch(j.batch, j.v, status)
  if j.webhook ~= '' then
    into_outbox(id, NOW, at)
    redis.call('PUBLISH', P .. C.db .. ':hooks', id)
  end
  return true
end

local STOP_ERROR = {
  cancelled = error_json('cancelled', 'the job was cancelled'),
  expired = error_json('deadline_exceeded',
    'the job was not done by its deadline: give it a later deadline_s, or try again when the queue is shorter'),
}

local function terminal_stop(id, stop) return terminal(id, stop, stop, STOP_ERROR[stop], '') end

-- The deaths that a job has seen, for the reason that a user is given in the end.
local function with_cause(causes, k, cause)
  return (causes ~= '' and causes .. '; ' or '') .. 'at token ' .. int(tonumber(k) + 1) .. ': ' .. cause
end

-- One death of the process that a job rode in. Returns true where it was one too many and the job has ended.
local function charge(id, cause)
  local key = record_key(id)
  local j = fields(key, 'k', 'strikes', 'struck_at', 'deaths', 'causes')
  local strikes = (j.struck_at == j.k) and tonumber(j.strikes) + 1 or 1
  local deaths = tonumber(j.deaths) + 1
  local causes = with_cause(j.causes, j.k, cause)
  redis.call('HSET', key, 'strikes', int(strikes), 'deaths', int(deaths), 'struck_at', j.k, 'boarded', '', 'causes', causes)
  if strikes < C.max_attempts and deaths < C.max_deaths then return false end
  local many = strikes >= C.max_attempts and string.format('%s times at the same token', int(strikes))
    or string.format('%s times in all', int(deaths))
  terminal(id, 'failed', 'error', error_json('worker_died', string.format(
    'the process that ran this job died %s (%s). Something in the job may be what kills it: change its prompt or parameters',
    many, causes)), '')
  return true
end

-- Riders under suspicion: what died with a sequence that had just boarded, or that has struck near here before.
local function is_young(j)
  if j.boarded == '' then return false end
  local k = tonumber(j.k)
  return k == tonumber(j.boarded) or (tonumber(j.strikes) > 0 and k <= tonumber(j.struck_at) + C.run_ahead)
end

-- A fence: only the owner of this very claim may write.
local function owned(j, epoch, nonce) return j.status == 'running' and j.epoch == epoch and j.owner == nonce end

-- A Celery message, into the broker's list. `template` is kombu's message for no task in particular
-- (tasks/invitations.py); '' sends none, for a caller that has a broker of its own.
local function send_message(template, queue, task)
  if template == '' then return end
  local fillings = { id = quote(task):sub(2, -2), queue = quote(queue):sub(2, -2),
    tag = quote(task .. ':' .. int(NOW_US)):sub(2, -2) }
  redis.call('LPUSH', queue, (template:gsub('@(%l+)@', fillings)))
end

-- The invitation to a job.
local function send_invitation(template, pool, id) send_message(template, queue_key(pool), id) end

-- The next waiting jobs of a pool, in order, marked as invited and with their messages sent.
-- So few messages are in the broker that the wait set alone decides the order: the free slots and two more. What lies in
-- the broker counts too, or full workers would have the same jobs invited again every 3 s.
local function invite_waiting(pool, template)
  local crew = Q.crew(pool)
  if not crew.ready then return {} end
  Q.check(pool)
  local young = NOW - C.invitation
  local inv = inv_key(pool)
  local pending = math.max(redis.call('ZCOUNT', inv, int(young), '+inf'), redis.call('LLEN', queue_key(pool)))
  local room = crew.free + 2 - pending
  local invited, next_job = {}, Q.in_order(pool, young)
  while room > 0 do
    local id, queue = next_job()
    if not id then break end
    local mark = redis.call('ZSCORE', inv, id)
    if not mark or tonumber(mark) < young then
      local j = fields(record_key(id), 'fingerprint', 'k', 'status', 'weight', 'charged')
      if j.status ~= 'queued' then
        leave_queues(id, pool)
        queue.offset = queue.offset - 1
      elseif crew.free == 0 or j.fingerprint == '' or j.k == '0' or crew.prints[j.fingerprint] then
        redis.call('ZADD', inv, int(NOW), id)
        send_invitation(template, pool, id)
        invited[#invited + 1] = id
        queue.time = queue.time + (Q.charge(pool, id, j.weight, j.charged) or 0)
        queue.served = nil
        room = room - 1
      end
    end
  end
  if #invited > 0 then keep_until(inv, int(NOW + C.deadline_most + C.retention)) end
  return invited
end
