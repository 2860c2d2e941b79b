-- Shared by every script of the ledger, as objects.lua, ends.lua and invitations.lua are; tasks/ledger.py puts the four before
-- each of them, this one first. docs/protocol.md explains it.
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
-- What waits, whose turn it is, how long that takes: queue.lua, shares.lua and rates.lua, which stand behind these parts.
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
