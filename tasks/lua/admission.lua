-- May more wait? Caps on what waits, in jobs and in tokens, of all pools together and of one owner. A part of the scripts
-- that accept: looking and accepting are one call, so that no burst comes in between.

local WAITING = { 'jobs', 'tokens', 'own_jobs', 'own_tokens', 'all_jobs', 'all_tokens' }

-- How much waits that caps count: { jobs, tokens, own_jobs, own_tokens }; and with what batches feed: { all_jobs, all_tokens }.
-- What lost its worker counts until another takes it up. The same of each pool where something waits: `pools`.
local function waiting(owner)
  local w = { pools = {} }
  for _, name in ipairs(WAITING) do w[name] = 0 end
  redis.call('ZREMRANGEBYSCORE', POOLS, '-inf', int(NOW))
  for _, pool in ipairs(redis.call('ZRANGE', POOLS, 0, -1)) do
    Q.check(pool)
    local of = { pool = pool }
    for _, name in ipairs(WAITING) do of[name] = 0 end
    local found = redis.call('HMGET', load_key(pool), 'jobs', 'tokens', 'jobs:' .. owner, 'tokens:' .. owner, 'fed', 'fed_tokens')
    local function add(name, i) of[name] = of[name] + tonumber(found[i] or 0) end
    add('jobs', 1)
    add('tokens', 2)
    add('own_jobs', 3)
    add('own_tokens', 4)
    for i, name in ipairs({ 'all_jobs', 'all_tokens' }) do
      add(name, i)
      add(name, i + 4)
    end
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', lost_key(pool), int(NOW), '+inf')) do
      local lost = weight(weight_of_record(id))
      of.all_jobs, of.all_tokens = of.all_jobs + 1, of.all_tokens + lost.tokens
      if lost.counted then
        of.jobs, of.tokens = of.jobs + 1, of.tokens + lost.tokens
        if lost.owner == owner then of.own_jobs, of.own_tokens = of.own_jobs + 1, of.own_tokens + lost.tokens end
      end
    end
    if of.all_jobs > 0 then w.pools[#w.pools + 1] = of end
    for _, name in ipairs(WAITING) do w[name] = w[name] + of[name] end
  end
  return w
end

-- The same with what was accepted just now.
local function add_waiting(w, pool, num_jobs, num_tokens)
  local of
  for _, one in ipairs(w.pools) do
    if one.pool == pool then of = one end
  end
  if not of then
    of = { pool = pool }
    for _, name in ipairs(WAITING) do of[name] = 0 end
    w.pools[#w.pools + 1] = of
  end
  for _, name in ipairs(WAITING) do
    local more = string.find(name, 'jobs') and num_jobs or num_tokens
    of[name], w[name] = of[name] + more, w[name] + more
  end
end

-- Ms until the pools where something of this kind waits are empty; nil where one of them is not known to move.
local function longest_drain_ms(w, what)
  local longest = 0
  for _, of in ipairs(w.pools) do
    if of[what] > 0 then
      local ms = Q.drain_ms(of.pool)
      if not ms then return end
      longest = math.max(longest, ms)
    end
  end
  return longest
end

-- What a client is told: how much waits, ms until there is room for it, until nothing waits, until nothing of the owner's does,
-- and until a late job would be done (null: not known).
local function numbers_json(w, room_ms, eta_ms)
  local function known(ms) return ms and int(math.ceil(ms)) or 'null' end
  return string.format('{"jobs":%s,"tokens":%s,"own_jobs":%s,"own_tokens":%s,"room_ms":%s,"drain_ms":%s,"own_drain_ms":%s,"eta_ms":%s}',
    int(w.jobs), int(w.tokens), int(w.own_jobs), int(w.own_tokens), known(room_ms), known(longest_drain_ms(w, 'jobs')),
    known(longest_drain_ms(w, 'own_jobs')), known(eta_ms))
end

-- Ms until so much of `what` is gone, in whichever pools it waits; nil where it is not known. Each pool goes at its own speed,
-- and is done with it at the latest when it is empty. An owner gets its turn as often as each other one that waits there.
local function room_ms(w, what, too_much)
  local unit = string.match(what, '%a+$')
  local parts, rate = {}, 0
  for _, of in ipairs(w.pools) do
    local drain = of[what] > 0 and Q.drain_ms(of.pool)
    if drain then
      local owners = what == unit and 1 or math.max(1, redis.call('ZCARD', shares_key(of.pool)))
      local part = { left = of[what], rate = math.max(of['all_' .. unit] / owners, of[what]) / math.max(1, drain) }
      parts[#parts + 1], rate = part, rate + part.rate
    end
  end
  table.sort(parts, function(a, b) return a.left / a.rate < b.left / b.rate end)
  local at = 0
  for _, part in ipairs(parts) do
    local empty = part.left / part.rate
    if too_much <= rate * (empty - at) then return at + too_much / rate end
    too_much, at, rate = too_much - rate * (empty - at), empty, rate - part.rate
  end
  if #parts > 0 and too_much < 0.001 then return at end
end

-- What is too much about a request: {verdict, numbers}, nothing where it may come in. own_full and full name the cap, of jobs
-- or tokens; never_fits is more than a cap has room for when nothing waits; late would not be done by its
-- deadline, and too_long not even if nothing else waited.
local function refusal(R, num_jobs, num_tokens, order)
  local w = waiting(R.key)
  local caps = {
    { 'own_full_jobs', R.most_jobs, 'own_jobs', num_jobs },
    { 'own_full_tokens', R.most_tokens, 'own_tokens', num_tokens },
    { 'full_jobs', C.queued_jobs, 'jobs', num_jobs },
    { 'full_tokens', C.queued_tokens, 'tokens', num_tokens },
  }
  for _, cap in ipairs(caps) do
    local verdict, most, _, more = unpack(cap)
    if most > 0 and more > most then
      return { 'never_fits_' .. string.match(verdict, '%a+$'), numbers_json(w) }, w
    end
  end
  for _, cap in ipairs(caps) do
    local verdict, most, what, more = unpack(cap)
    local too_much = w[what] + more - most
    if most > 0 and too_much > 0 then return { verdict, numbers_json(w, room_ms(w, what, too_much)) }, w end
  end
  if C.refuse_late then
    local class = R.default_tokens ~= '' and 'd' or 'a'
    local eta = Q.eta_ms(R.pool, class, R.max, num_jobs - 1, Q.place(R.pool, R.key, order, ''))
    if eta and eta > R.deadline then
      local alone = Q.alone_ms(R.pool, class, R.max)
      if alone > R.deadline then return { 'too_long', numbers_json(w, nil, alone) }, w end
      return { 'late', numbers_json(w, eta - R.deadline, eta) }, w
    end
  end
  return nil, w
end
