-- What waits: whose it is and how much. The wait set is the truth. What is counted here changes in the scripts that change
-- that set, so that no kill can come between; where a process of the release before, which does not count, has changed it,
-- the difference is made up (Q.check). A part of every script, made when it needs one of
-- these functions (tasks/ledger.py).

local POOLS = P .. 'pools'

local function queued_key(pool) return P .. 'queued:' .. pool end
local function load_key(pool) return P .. 'load:' .. pool end
local function shares_key(pool) return P .. 'shares:' .. pool end
-- the length tells where an owner's name ends, whatever is in it
local function own_key(pool, owner) return P .. 'own:' .. int(#owner) .. ':' .. owner .. ':' .. pool end

-- What a job weighs on the queue, as its record says it: prompt's tokens and max_tokens together, max_tokens alone, whether
-- that was the default (d) or asked for (a), whether caps count it (lines of batches wait outside of them), its owner.
function Q.weigh(tokens, max, default, counted, owner)
  return string.format('%s %s %s %s %s', int(tokens), int(max), default and 'd' or 'a', counted and '1' or '0', owner)
end

local function weight(text)
  local tokens, max, class, counted, owner = string.match(text, '^(%d+) (%d+) (%a) (%d) (.*)$')
  return { tokens = tonumber(tokens), max = tonumber(max), class = class, counted = counted == '1', owner = owner }
end

-- A record of the release before does not say it.
local function weight_of_record(id)
  local j = fields(record_key(id), 'weight', 'params', 'default_tokens')
  if j.weight ~= '' then return j.weight end
  local max = j.params ~= '' and tonumber(cjson.decode(j.params).max_tokens) or 0
  return Q.weigh(max, max, j.default_tokens ~= '', true, 'all')
end

Q.weight_of_record = weight_of_record

local function count(pool, w, by)
  local load = load_key(pool)
  redis.call('HINCRBY', load, 'max:' .. w.class, int(by * w.max))
  redis.call('HINCRBY', load, w.counted and 'jobs' or 'fed', int(by))
  redis.call('HINCRBY', load, w.counted and 'tokens' or 'fed_tokens', int(by * w.tokens))
  if not w.counted then return end
  redis.call('HINCRBY', load, 'tokens:' .. w.owner, int(by * w.tokens))
  if redis.call('HINCRBY', load, 'jobs:' .. w.owner, int(by)) == 0 then
    redis.call('HDEL', load, 'jobs:' .. w.owner, 'tokens:' .. w.owner)
  end
end

-- A job waits from now on, at its place in the order of its pool and of its owner.
function Q.join(id, pool, text, order, expires)
  Q.leave(id, pool)
  local w = weight(text)
  local own = own_key(pool, w.owner)
  redis.call('ZADD', wait_key(pool), order, id)
  redis.call('ZADD', own, order, id)
  redis.call('HSET', queued_key(pool), id, text)
  count(pool, w, 1)
  redis.call('ZADD', POOLS, 'GT', int(expires), pool)
  for _, key in ipairs({ wait_key(pool), own, queued_key(pool), load_key(pool), POOLS }) do keep_until(key, int(expires)) end
  Q.begin(pool, w.owner, expires)
end

-- It waits no more, if it did; what was counted for it is taken back as it was counted.
function Q.leave(id, pool)
  redis.call('ZREM', lost_key(pool), id)
  local text = redis.call('HGET', queued_key(pool), id)
  if not text then return end
  local w = weight(text)
  redis.call('HDEL', queued_key(pool), id)
  count(pool, w, -1)
  redis.call('ZREM', own_key(pool, w.owner), id)
  if redis.call('EXISTS', own_key(pool, w.owner)) == 0 then Q.rest(pool, w.owner) end
  if redis.call('EXISTS', queued_key(pool)) == 0 then redis.call('DEL', load_key(pool)) end
end

-- Make up for what was changed without counting: once a second at most, for it takes a look at everything that waits.
function Q.check(pool)
  if redis.call('HLEN', queued_key(pool)) == redis.call('ZCARD', wait_key(pool)) then return end
  local checked = tonumber(redis.call('HGET', load_key(pool), 'checked') or 0)
  if NOW >= checked and NOW - checked < 1000 then return end
  Q.recount(pool)
end

function Q.recount(pool)
  for _, id in ipairs(redis.call('HKEYS', queued_key(pool))) do
    if not redis.call('ZSCORE', wait_key(pool), id) then Q.leave(id, pool) end
  end
  local waiting = redis.call('ZRANGE', wait_key(pool), 0, -1, 'WITHSCORES')
  for i = 1, #waiting, 2 do
    local id = waiting[i]
    local expires = redis.call('PEXPIRETIME', record_key(id))
    local text = redis.call('HGET', queued_key(pool), id)
    if expires == -2 then
      leave_queues(id, pool)
    elseif not text or not redis.call('ZSCORE', own_key(pool, weight(text).owner), id) then
      Q.join(id, pool, weight_of_record(id), int(tonumber(waiting[i + 1])), expires)
    end
  end
  if redis.call('EXISTS', load_key(pool)) == 1 then redis.call('HSET', load_key(pool), 'checked', int(NOW)) end
end

-- The worker of a riding job is gone: until another takes it up it counts as waiting, and is refused by nobody. Told with
-- every look of the reaper, which forgets what it is not told again.
function Q.lose(id, pool, until_ms)
  redis.call('ZADD', lost_key(pool), int(until_ms), id)
  redis.call('ZREMRANGEBYSCORE', lost_key(pool), '-inf', int(NOW))
  redis.call('PEXPIRE', lost_key(pool), 60000)
end

-- The workers of a pool that are ready: their slots, how many are free, and whose models have one.
local crews = {}
function Q.crew(pool)
  if crews[pool] then return crews[pool] end
  local crew = { ready = false, slots = 0, free = 0, prints = {} }
  for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', pool_workers_key(pool), int(NOW), '+inf')) do
    local w = fields(worker_key(incarnation), 'state', 'free', 'fingerprint', 'slots')
    if w.state == 'ready' then
      crew.ready = true
      local free = tonumber(w.free == '' and 0 or w.free)
      crew.free = crew.free + free
      crew.slots = crew.slots + (tonumber(w.slots == '' and free or w.slots))
      if free > 0 then crew.prints[w.fingerprint] = true end
    end
  end
  crews[pool] = crew
  return crew
end
