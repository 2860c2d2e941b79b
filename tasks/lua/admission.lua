-- May more wait? Caps on what waits, in jobs and in tokens, of all pools together and of one owner. A part of the scripts
-- that accept: looking and accepting are one call, so that no burst comes in between.

-- How much waits that caps count: { jobs, tokens, own_jobs, own_tokens }; and with what batches feed: { all_jobs, all_tokens }.
-- What lost its worker counts until another takes it up.
local function waiting(owner)
  local w = { jobs = 0, tokens = 0, own_jobs = 0, own_tokens = 0, all_jobs = 0, all_tokens = 0 }
  redis.call('ZREMRANGEBYSCORE', POOLS, '-inf', int(NOW))
  for _, pool in ipairs(redis.call('ZRANGE', POOLS, 0, -1)) do
    Q.check(pool)
    local found = redis.call('HMGET', load_key(pool), 'jobs', 'tokens', 'jobs:' .. owner, 'tokens:' .. owner, 'fed', 'fed_tokens')
    local function add(name, i) w[name] = w[name] + tonumber(found[i] or 0) end
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
      w.all_jobs, w.all_tokens = w.all_jobs + 1, w.all_tokens + lost.tokens
      if lost.counted then
        w.jobs, w.tokens = w.jobs + 1, w.tokens + lost.tokens
        if lost.owner == owner then w.own_jobs, w.own_tokens = w.own_jobs + 1, w.own_tokens + lost.tokens end
      end
    end
  end
  return w
end

-- What a client is told: how much waits, ms until there is room for it, and until nothing waits (null: not known).
local function numbers_json(w, room_ms, drain_ms)
  local function known(ms) return ms and int(math.ceil(ms)) or 'null' end
  return string.format('{"jobs":%s,"tokens":%s,"own_jobs":%s,"own_tokens":%s,"room_ms":%s,"drain_ms":%s}', int(w.jobs), int(w.tokens),
    int(w.own_jobs), int(w.own_tokens), known(room_ms), known(drain_ms))
end

-- Ms until this part of what waits in a pool is gone.
local function part_ms(pool, part)
  local drain = Q.drain_ms(pool)
  if drain and part > 0 then return drain * math.min(1, part) end
end

-- What is too much about a request: {verdict, numbers}, nothing where it may come in. own_full and full name the cap, of jobs
-- or tokens; never_fits is more than a cap has room for when nothing waits; late would not be done by its deadline.
local function refusal(R, num_jobs, num_tokens, order)
  local w = waiting(R.key)
  -- an owner gets its turn as often as each other one that waits
  local owners = math.max(1, redis.call('ZCARD', shares_key(R.pool)))
  local caps = {
    { 'own_full_jobs', R.most_jobs, w.own_jobs, num_jobs, w.all_jobs / owners },
    { 'own_full_tokens', R.most_tokens, w.own_tokens, num_tokens, w.all_tokens / owners },
    { 'full_jobs', C.queued_jobs, w.jobs, num_jobs, w.all_jobs },
    { 'full_tokens', C.queued_tokens, w.tokens, num_tokens, w.all_tokens },
  }
  for _, cap in ipairs(caps) do
    local verdict, most, _, more = unpack(cap)
    if most > 0 and more > most then
      return { 'never_fits_' .. string.match(verdict, '%a+$'), numbers_json(w, nil, Q.drain_ms(R.pool)) }, w
    end
  end
  for _, cap in ipairs(caps) do
    local verdict, most, waits, more, all = unpack(cap)
    local too_much = waits + more - most
    if most > 0 and too_much > 0 then
      return { verdict, numbers_json(w, part_ms(R.pool, too_much / math.max(1, all)), Q.drain_ms(R.pool)) }, w
    end
  end
  if C.refuse_late then
    local place = Q.place(R.pool, R.key, order, '') + num_jobs - 1
    local eta = Q.eta_ms(R.pool, place, R.default_tokens ~= '' and 'd' or 'a', R.max)
    if eta and eta > R.deadline then return { 'late', numbers_json(w, eta - R.deadline, eta) }, w end
  end
  return nil, w
end
