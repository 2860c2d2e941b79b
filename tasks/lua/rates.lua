-- How fast a pool is, by the jobs that have ended in it, and what follows for one that waits. A part of every script (tasks/ledger.py).
-- The newest job counts most: each further one makes those before it count a 33rd less.

local FADE = 0.97
local RATE_KEPT_MS = 7 * 86400000
-- A queue is looked at job by job up to here, and those of all owners together up to there; what lies further ahead counts as
-- the mean of what waits.
local LOOKED_AT = 64
local LOOKED_AT_IN_ALL = 256
local RATE_FIELDS = { 'jobs', 'ms', 'square', 'tokens', 'prompt', 'used:a', 'max:a', 'used:d', 'max:d' }

local function rate_key(pool) return P .. 'rate:' .. pool end

local known_rates = {}
-- Sums over the last jobs: their number, the time in a slot and its square, tokens made and those of prompts; and of those
-- that asked for a number of tokens (a) and those that took the default (d), how many they made and might have made.
-- nil where no job has ended yet.
function Q.rates(pool)
  if known_rates[pool] == nil then
    local values = redis.call('HMGET', rate_key(pool), unpack(RATE_FIELDS))
    local r = {}
    for i, name in ipairs(RATE_FIELDS) do r[name] = tonumber(values[i] or 0) end
    known_rates[pool] = r.tokens > 0 and r or false
  end
  return known_rates[pool] or nil
end

-- A job has ended well: what it did since its last claim says how fast a slot is.
function Q.measure(pool, j)
  local tokens = tonumber(j.k) - tonumber(j.claim_k == '' and 0 or j.claim_k)
  if j.claimed_at == '' or tokens <= 0 then return end
  local r = Q.rates(pool) or {}
  local ms = math.max(1, NOW - tonumber(j.claimed_at))
  local new = { jobs = 1, ms = ms, square = ms * ms, tokens = tokens, prompt = tonumber(j.prompt_tokens == '' and 0 or j.prompt_tokens) }
  if j.weight ~= '' then
    local w = weight(j.weight)
    new['used:' .. w.class], new['max:' .. w.class] = tonumber(j.k), w.max
  end
  local args = {}
  for _, name in ipairs(RATE_FIELDS) do
    local seen = r[name] or 0
    -- of a kind that this job is not, nothing fades
    if new[name] then seen = seen * FADE + new[name] end
    args[#args + 1] = name
    args[#args + 1] = string.format('%.4f', seen)
  end
  redis.call('HSET', rate_key(pool), unpack(args))
  redis.call('PEXPIRE', rate_key(pool), RATE_KEPT_MS)
  known_rates[pool] = nil
end

-- Tokens that a job of this class with this max_tokens is likely to make.
local function likely_tokens(r, class, max)
  local might = r['max:' .. class]
  return might > 0 and max * math.min(1, r['used:' .. class] / might) or max
end

-- Ms in a slot for so many tokens.
local function slot_ms(r, tokens) return tokens * r.ms / r.tokens end

local all_lanes = {}
-- The queues of the owners of a pool, as the pump sees them. Invited jobs go first whatever their turn: they have paid.
local function lanes_of(pool)
  if all_lanes[pool] then return all_lanes[pool] end
  local lanes, by_owner = {}, {}
  local found = redis.call('ZRANGE', shares_key(pool), 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    lanes[#lanes + 1] = { owner = found[i], time = tonumber(found[i + 1]), invited = {} }
    by_owner[found[i]] = lanes[#lanes]
  end
  all_lanes[pool] = { lanes = lanes, by_owner = by_owner, invited = {}, invited_weights = {}, is_invited = {} }
  return all_lanes[pool]
end

-- What is needed of them where there is more than one.
local function look_along(pool, all)
  if all.is_known then return end
  all.is_known = true
  for _, id in ipairs(redis.call('ZRANGE', inv_key(pool), 0, -1)) do
    local text = redis.call('HGET', queued_key(pool), id)
    local lane = text and all.by_owner[weight(text).owner]
    if lane then
      local order = tonumber(redis.call('ZSCORE', wait_key(pool), id) or 0)
      all.invited[#all.invited + 1] = order
      all.invited_weights[#all.invited] = weight(text)
      lane.invited[#lane.invited + 1] = order
      all.is_invited[id] = true
    end
  end
  for _, lane in ipairs(all.lanes) do
    local key = own_key(pool, lane.owner)
    lane.mean = mean_use(pool, lane.owner)
    lane.left = redis.call('ZCARD', key) - #lane.invited
    lane.served = tonumber(redis.call('HGET', use_key(pool), 's:' .. lane.owner) or 0)
    lane.first = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
  end
end

local function how_many_before(orders, order)
  local n = 0
  for _, other in ipairs(orders) do
    if other < order then n = n + 1 end
  end
  return n
end

-- Place of a job of this owner and order from 1: how many are invited before it, and it. Where jobs of one owner differ
-- much in what they use, places between owners are estimates. `id` is '' for a job that is not there yet. Where others wait
-- too, also whose jobs go before it: {invited = how many that are invited, {lane, how many of its next ones}…}.
function Q.place(pool, owner, order, id)
  local all = lanes_of(pool)
  local mine = all.by_owner[owner]
  if #all.lanes == 0 or (#all.lanes == 1 and mine) then
    local rank = id ~= '' and redis.call('ZRANK', wait_key(pool), id)
    return (rank or redis.call('ZCOUNT', wait_key(pool), '-inf', '(' .. int(order))) + 1
  end
  look_along(pool, all)
  if all.is_invited[id] then
    local before = how_many_before(all.invited, order)
    return before + 1, { invited = before }
  end
  local ahead = 0
  if mine then
    ahead = math.max(0, redis.call('ZCOUNT', own_key(pool, owner), '-inf', '(' .. int(order)) - how_many_before(mine.invited, order))
  else
    local time, is_free = start_time(pool, owner)
    mine = { time = time, served = is_free and FRESH or 0, first = order }
  end
  local whose = { invited = #all.invited, { mine, ahead } }
  local is_next = mine.served == FRESH and ahead == 0
  local turn = mine.time + ahead * (mine.mean or mean_use(pool, owner))
  local place = #all.invited + ahead + 1
  for _, other in ipairs(all.lanes) do
    if other ~= mine and other.left > 0 then
      local many = 0
      local earlier = other.served < mine.served or (other.served == mine.served and other.first < mine.first)
      if other.time <= turn and not is_next then
        many = math.ceil((turn - other.time) / other.mean)
        if earlier and (turn - other.time) % other.mean == 0 then many = many + 1 end
      end
      if other.served == FRESH and (earlier or not is_next) then many = math.max(many, 1) end
      many = math.min(many, other.left)
      place = place + many
      whose[#whose + 1] = { other, many }
    end
  end
  return place, whose
end

-- Ms until all that waits is done, nil where that is not known.
function Q.drain_ms(pool)
  local r, crew = Q.rates(pool), Q.crew(pool)
  if not r or crew.slots == 0 then return end
  local load = redis.call('HMGET', load_key(pool), 'max:a', 'max:d')
  local tokens = likely_tokens(r, 'a', tonumber(load[1] or 0)) + likely_tokens(r, 'd', tonumber(load[2] or 0))
  return slot_ms(r, math.max(0, tokens)) / crew.slots
end

local all_sums = {}
-- Ms in a slot for the jobs that wait first: of one, of two, and so on.
local function first_sums(pool, r)
  if all_sums[pool] then return all_sums[pool] end
  local sums = { [0] = 0 }
  local ids = redis.call('ZRANGE', wait_key(pool), 0, LOOKED_AT - 1)
  if #ids > 0 then
    for _, text in ipairs(redis.call('HMGET', queued_key(pool), unpack(ids))) do
      if not text then break end
      local w = weight(text)
      sums[#sums + 1] = sums[#sums] + slot_ms(r, likely_tokens(r, w.class, w.max))
    end
  end
  all_sums[pool] = sums
  return sums
end

-- Ms in a slot for the next so many jobs of an owner, those that are invited apart. `mean`: of a job that was not looked at.
local looked_at = 0
local function lane_ms(pool, r, lane, many, mean)
  if many == 0 or not lane.owner then return many * mean end
  if not lane.sums then
    lane.sums = { [0] = 0 }
    local last = math.min(LOOKED_AT, LOOKED_AT_IN_ALL - looked_at) - 1
    local ids = last >= 0 and redis.call('ZRANGE', own_key(pool, lane.owner), 0, last) or {}
    looked_at = looked_at + #ids
    local texts = #ids > 0 and redis.call('HMGET', queued_key(pool), unpack(ids)) or {}
    for i, id in ipairs(ids) do
      if texts[i] and not lanes_of(pool).is_invited[id] then
        local w = weight(texts[i])
        lane.sums[#lane.sums + 1] = lane.sums[#lane.sums] + slot_ms(r, likely_tokens(r, w.class, w.max))
      end
    end
  end
  local near = math.min(many, #lane.sums)
  if #lane.sums > 0 then mean = lane.sums[#lane.sums] / #lane.sums end
  return lane.sums[near] + (many - near) * mean
end

-- Ms in a slot for what goes before a job at this place; `whose` as Q.place says it.
local function ahead_ms(pool, r, place, whose, mean)
  if not whose then
    local sums = first_sums(pool, r)
    local near = math.min(place - 1, #sums)
    return sums[near] + mean * (place - 1 - near)
  end
  local all = lanes_of(pool)
  local ms = 0
  for _, w in ipairs(all.invited_weights) do
    ms = ms + slot_ms(r, likely_tokens(r, w.class, w.max)) * whose.invited / #all.invited
  end
  for _, one in ipairs(whose) do ms = ms + lane_ms(pool, r, one[1], one[2], mean) end
  return ms
end

-- Ms until a job is done that has this class and max_tokens, at a place of which Q.place says whose go before it; nil where
-- no worker is ready, or none has ended a job yet. It comes with `siblings` others like it, which go before it too. The work
-- ahead of it is spread over the slots; when it gets one, the others are on average in mid-ride.
function Q.eta_ms(pool, class, max, siblings, place, whose)
  local r, crew = Q.rates(pool), Q.crew(pool)
  if not r or crew.slots == 0 then return end
  local own = slot_ms(r, likely_tokens(r, class, max))
  if place + siblings <= crew.free then return own end
  local mean = (Q.drain_ms(pool) or 0) * crew.slots / math.max(1, redis.call('ZCARD', wait_key(pool)))
  local residual = crew.free > 0 and 0 or r.square / (2 * r.ms)
  return (ahead_ms(pool, r, place, whose, mean) + siblings * own + residual) / crew.slots + own
end

-- Ms in a slot for a job of this class and max_tokens, where its ETA is known.
function Q.alone_ms(pool, class, max)
  local r = Q.rates(pool)
  return slot_ms(r, likely_tokens(r, class, max))
end

-- The same for a job that rides.
function Q.riding_eta_ms(pool, text, k)
  local r = Q.rates(pool)
  if not r or text == '' then return end
  local w = weight(text)
  return slot_ms(r, math.max(0, likely_tokens(r, w.class, w.max) - k))
end

-- Place and ETA of a job that waits.
function Q.outlook(pool, id, text)
  local order = redis.call('ZSCORE', wait_key(pool), id)
  if not order then return end
  local w = weight(text ~= '' and text or weight_of_record(id))
  local place, whose = Q.place(pool, w.owner, tonumber(order), id)
  return place, Q.eta_ms(pool, w.class, w.max, 0, place, whose)
end
