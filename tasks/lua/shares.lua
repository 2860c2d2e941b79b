-- Whose turn it is. Owners share a pool by the tokens that their jobs really used: start-time fair queueing (Goyal, Vin and
-- Cheng, SIGCOMM 1996) with the lift of the virtual token counter (Sheng et al., "Fairness in Serving Large Language
-- Models", OSDI 2024). Each owner has a virtual time, in tokens; the least is served next, and pays for a job when that is
-- invited: what its jobs used lately on average. The job's end settles the difference. An owner of whom nothing waited and
-- who owes nothing has its first job served before anybody's next, whatever others have been given back. A part of every script (tasks/ledger.py).

-- Of an owner of whom nobody knows yet.
local FIRST_GUESS = 256
local FORGOTTEN_MS = 3600000
-- In the place of when an owner was served last: it is to be served before all others.
local FRESH = -1

local function use_key(pool) return P .. 'use:' .. pool end

-- What is kept of an owner beside its turn: its virtual time while nothing of it waits, the mean use of its jobs, since when.
local function remembered(pool, owner)
  local text = redis.call('HGET', use_key(pool), 'o:' .. owner)
  if not text then return end
  local time, mean, at = string.match(text, '^(%S+) (%S+) (%S+)$')
  return { time = tonumber(time), mean = tonumber(mean), at = tonumber(at) }
end

local function remember(pool, owner, time, mean)
  redis.call('HSET', use_key(pool), 'o:' .. owner, int(time) .. ' ' .. int(mean) .. ' ' .. int(NOW))
  keep_until(use_key(pool), int(NOW + FORGOTTEN_MS))
end

-- The virtual time of a pool: that of whoever was served last, at that time. Never less than before.
local function pool_time(pool)
  return tonumber(redis.call('HGET', use_key(pool), 'now') or redis.call('ZRANGE', shares_key(pool), 0, 0, 'WITHSCORES')[2] or 0)
end

-- Where an owner of whom nothing waits would begin, and whether it owes nothing. A pause leaves neither credit nor debt: it
-- begins with the pool, and later than that only where it used more than its share a moment ago.
local function start_time(pool, owner)
  local now = pool_time(pool)
  local known = remembered(pool, owner)
  if known and NOW - known.at <= C.share_memory and known.time > now then return known.time, false end
  return now, true
end

local function mean_use(pool, owner)
  local known = remembered(pool, owner)
  local mean = known and known.mean or 0
  if mean == 0 then
    local r = Q.rates(pool)
    mean = r and (r.tokens + r.prompt) / r.jobs or FIRST_GUESS
  end
  return math.max(1, math.floor(mean + 0.5))
end

-- Something of this owner waits.
function Q.begin(pool, owner, expires)
  local shares = shares_key(pool)
  if not redis.call('ZSCORE', shares, owner) then
    local time, is_free = start_time(pool, owner)
    redis.call('ZADD', shares, int(time), owner)
    if is_free then redis.call('HSET', use_key(pool), 's:' .. owner, FRESH) end
    -- names of owners that never come back are forgotten, a little with each that comes
    for _, name in ipairs(redis.call('HRANDFIELD', use_key(pool), 2) or {}) do
      local other = string.match(name, '^o:(.*)$')
      local known = other and remembered(pool, other)
      if known and NOW - known.at > FORGOTTEN_MS then redis.call('HDEL', use_key(pool), name) end
    end
  end
  keep_until(shares, int(expires))
  redis.call('HSETNX', use_key(pool), 'now', '0')
  keep_until(use_key(pool), int(expires))
end

-- Nothing of this owner waits any more.
function Q.rest(pool, owner)
  local time = redis.call('ZSCORE', shares_key(pool), owner)
  if not time then return end
  local known = remembered(pool, owner)
  redis.call('ZREM', shares_key(pool), owner)
  redis.call('HDEL', use_key(pool), 's:' .. owner)
  remember(pool, owner, tonumber(time), known and known.mean or 0)
end

-- A job is invited: its owner pays in advance, once however often it is invited or handed back. Returns the price, nil where
-- it was paid.
function Q.charge(pool, id, text, charged)
  if charged ~= '' then return end
  local owner = weight(text ~= '' and text or weight_of_record(id)).owner
  local price = mean_use(pool, owner)
  local time = tonumber(redis.call('ZSCORE', shares_key(pool), owner) or 0)
  if time > pool_time(pool) then redis.call('HSET', use_key(pool), 'now', int(time)) end
  redis.call('ZADD', shares_key(pool), 'XX', 'INCR', int(price), owner)
  redis.call('HSET', use_key(pool), 's:' .. owner, int(NOW_US))
  redis.call('HSET', record_key(id), 'charged', int(price))
  return price
end

-- A job is handed back before its end: it is paid for again when its turn comes.
function Q.refund(pool, id, text, charged)
  if charged == '' then return end
  local owner = weight(text ~= '' and text or weight_of_record(id)).owner
  if redis.call('ZSCORE', shares_key(pool), owner) then redis.call('ZINCRBY', shares_key(pool), '-' .. charged, owner) end
  redis.call('HSET', record_key(id), 'charged', '')
end

-- A job has ended: its owner has used what it used.
function Q.settle(pool, j)
  local used = 0
  if j.rides ~= '' then used = tonumber(j.k) + tonumber(j.prompt_tokens == '' and 0 or j.prompt_tokens) end
  local more = used - tonumber(j.charged == '' and 0 or j.charged)
  if used == 0 and more == 0 then return end
  local owner = j.weight ~= '' and weight(j.weight).owner or 'all'
  local known = remembered(pool, owner)
  local mean = known and known.mean or 0
  if j.k ~= '0' then mean = mean == 0 and used or mean + (used - mean) / 8 end
  if redis.call('ZSCORE', shares_key(pool), owner) then
    redis.call('ZINCRBY', shares_key(pool), int(more), owner)
    remember(pool, owner, known and known.time or 0, mean)
  else
    local time = (known and known.time or start_time(pool, owner)) + more
    remember(pool, owner, time, mean)
    -- what was used while nobody waited for it is owed to nobody: the time of an idle server is that of its last job's end
    if redis.call('EXISTS', shares_key(pool)) == 0 and time > pool_time(pool) then
      redis.call('HSET', use_key(pool), 'now', int(time))
    end
  end
end

-- The waiting jobs of a pool in the order of their turns, as a function that returns the next one and its owner's queue. First
-- those that were invited and whose message was lost. Where virtual times are equal, who was served longest ago comes
-- first, and then the job that comes first in the order of all.
function Q.in_order(pool, young)
  local again, lost = {}, { offset = 0, time = 0 }
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', inv_key(pool), '-inf', '(' .. int(young))) do
    local order = redis.call('ZSCORE', wait_key(pool), id)
    if order then again[#again + 1] = { id = id, order = tonumber(order) } end
  end
  table.sort(again, function(a, b) return a.order < b.order end)
  local found = redis.call('ZRANGE', shares_key(pool), 0, -1, 'WITHSCORES')
  local queues = {}
  for i = 1, #found, 2 do
    queues[#queues + 1] = { owner = found[i], time = tonumber(found[i + 1]), key = own_key(pool, found[i]), offset = 0, page = {},
      at = 1 }
  end
  -- what an older release let in is seen here before it is counted
  if #queues <= 1 then
    queues[1] = queues[1] or { owner = 'all', time = 0, offset = 0, page = {}, at = 1 }
    queues[1].key = wait_key(pool)
  end

  local function head(q)
    if q.at > #q.page and not q.empty then
      q.page, q.at = redis.call('ZRANGE', q.key, q.offset, q.offset + 31), 1
      q.offset = q.offset + #q.page
      q.empty = #q.page == 0
      -- an owner of whom nothing is left: its records have expired while no process lived
      if q.offset == 0 and q.key ~= wait_key(pool) then Q.recount(pool) end
    end
    return q.page[q.at]
  end
  local function served(q)
    q.served = q.served or tonumber(redis.call('HGET', use_key(pool), 's:' .. q.owner) or 0)
    return q.served
  end
  local function order(q) return tonumber(redis.call('ZSCORE', wait_key(pool), head(q)) or 0) end
  local function before(a, b)
    if (served(a) == FRESH) ~= (served(b) == FRESH) then return served(a) == FRESH end
    if served(a) ~= FRESH and a.time ~= b.time then return a.time < b.time end
    if served(a) ~= served(b) then return served(a) < served(b) end
    return order(a) < order(b)
  end

  return function()
    if #again > 0 then return table.remove(again, 1).id, lost end
    local first
    for _, q in ipairs(queues) do
      if head(q) and (not first or before(q, first)) then first = q end
    end
    if not first then return end
    local id = head(first)
    first.at = first.at + 1
    return id, first
  end
end
