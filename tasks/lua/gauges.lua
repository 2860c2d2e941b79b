-- How every pool is now and what was counted of it, for /metrics; nothing is written. What rides, and what lost its worker, is
-- read off the leases, so that a dead worker's jobs are told apart when its lease has run out, whoever has seen it.
-- Returns, for each pool by name, itself, its numbers as JSON, and the hash of what was counted.

-- So many jobs that are due soon are looked at, and so many of those that wait first.
local DUE_LOOKED_AT = 2000
local WAITING_LOOKED_AT = 128

local riding, lost, oldest = {}, {}, {}
local function older(pool, ms) oldest[pool] = math.max(oldest[pool] or 0, ms) end

-- A job that rides is due when its lease ends, one that lost its worker when it is looked at next: both stand first.
local soon = int(NOW + math.max(C.lease, C.grace, C.look_again) + 1000)
local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', soon, 'LIMIT', 0, DUE_LOOKED_AT)
local all_seen = #due < DUE_LOOKED_AT
for _, id in ipairs(due) do
  local j = fields(record_key(id), 'status', 'lease', 'pool')
  if j.status == 'running' then
    local overdue = NOW - tonumber(j.lease)
    if overdue <= 0 then
      riding[j.pool] = (riding[j.pool] or 0) + 1
    else
      lost[j.pool] = (lost[j.pool] or 0) + 1
      older(j.pool, overdue)
    end
  end
end

local function look_at_oldest(pool)
  for _, id in ipairs(redis.call('ZRANGE', wait_key(pool), 0, WAITING_LOOKED_AT - 1)) do
    local created_at = redis.call('HGET', record_key(id), 'created_at')
    if created_at then older(pool, NOW - tonumber(created_at)) end
  end
end

local function workers_of(pool)
  local found = { states = { loading = 0, ready = 0, restarting = 0, draining = 0, broken = 0 }, slots = 0, used = 0 }
  for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', pool_workers_key(pool), int(NOW), '+inf')) do
    local w = fields(worker_key(incarnation), 'state', 'slots', 'free')
    if found.states[w.state] then
      found.states[w.state] = found.states[w.state] + 1
      local slots, free = tonumber(w.slots) or 0, tonumber(w.free) or 0
      if w.state == 'ready' then found.slots = found.slots + slots end
      found.used = found.used + math.max(0, slots - free)
    end
  end
  return found
end

local function numbers_of(pool)
  look_at_oldest(pool)
  local found = workers_of(pool)
  local load = redis.call('HMGET', P .. 'load:' .. pool, 'jobs', 'tokens')
  local waiting = redis.call('ZCARD', wait_key(pool)) + (lost[pool] or 0)
  -- a job at the end of the queue that makes no token: what is left is the wait
  local eta = Q.eta_ms(pool, 'd', 0, 0, waiting + 1)
  found.running = all_seen and (riding[pool] or 0) or found.used
  found.waiting = waiting
  found.invited = redis.call('ZCARD', inv_key(pool))
  found.oldest_ms = math.floor(oldest[pool] or 0)
  found.queued_jobs = tonumber(load[1] or 0)
  found.queued_tokens = tonumber(load[2] or 0)
  found.eta_ms = eta and math.floor(eta)
  found.generated = tonumber(redis.call('HGET', GENERATED, pool) or 0)
  return cjson.encode(found)
end

local names, is_known = {}, {}
local function know(pool)
  if not is_known[pool] then names[#names + 1] = pool end
  is_known[pool] = true
end
for _, pool in ipairs(redis.call('HKEYS', P .. 'models')) do know(pool) end
for _, pool in ipairs(redis.call('ZRANGEBYSCORE', P .. 'pools', int(NOW), '+inf')) do know(pool) end
table.sort(names)

local answer = {}
for _, pool in ipairs(names) do
  answer[#answer + 1] = pool
  answer[#answer + 1] = numbers_of(pool)
  answer[#answer + 1] = redis.call('HGETALL', counted_key(pool))
end
return answer
