-- Look at what is due, at most 50 a call; a compare-and-set each, right with any number of reapers. Each look ends the
-- job or moves its due time beyond now. ARGV[2]: template of the message of an invitation.
-- Returns {number looked at, id, pool…}: running jobs whose lease ran out are invited here, never from the wait set.
local tick_key = P .. 'tick'
local tick = tonumber(redis.call('GET', tick_key) or 0)
if NOW - tick > C.tick_stale then redis.call('SET', P .. 'grace', int(NOW + C.grace), 'PX', int(C.grace + 600000)) end
redis.call('SET', tick_key, int(NOW), 'PX', 600000)
local in_grace = not past_grace()

-- Who lives in a pool: is one ready, does one load, which models are served, and which of them by one that is ready.
local pools = {}
local function workers_of(pool)
  if pools[pool] then return pools[pool] end
  local seen = { ready = false, loading = false, served = {}, ready_for = {} }
  for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', pool_workers_key(pool), int(NOW), '+inf')) do
    local w = fields(worker_key(incarnation), 'state', 'fingerprint')
    seen.served[w.fingerprint] = true
    if w.state == 'loading' then seen.loading = true end
    if w.state == 'ready' then
      seen.ready = true
      seen.ready_for[w.fingerprint] = true
    end
  end
  pools[pool] = seen
  return seen
end

-- A job with tokens goes on only where its own model is served. While the pool has a ready worker and none with that
-- model lives (one that loads may be it), for C.model_gone in a row, the job cannot go on: it ends with what it has.
local function model_is_gone(id, key, j)
  local workers = workers_of(j.pool)
  if j.k == '0' or in_grace or not workers.ready or workers.loading or workers.served[j.fingerprint] then
    if j.unserved_since ~= '' then redis.call('HSET', key, 'unserved_since', '') end
    return false
  end
  if j.unserved_since == '' then
    redis.call('HSET', key, 'unserved_since', int(NOW))
    return false
  end
  if NOW - tonumber(j.unserved_since) < C.model_gone then return false end
  terminal(id, 'failed', 'error', error_json('model_changed', 'the model that this job began with is no longer served: the ' ..
    'workers of ' .. j.pool .. ' have loaded another one. Submit the job again, or start a worker with its model'), '')
  return true
end

local function invite(id, j, invited)
  local workers = workers_of(j.pool)
  if not (j.k == '0' and workers.ready or workers.ready_for[j.fingerprint]) then return false end
  redis.call('ZADD', inv_key(j.pool), int(NOW), id)
  keep_until(inv_key(j.pool), int(redis.call('PEXPIRETIME', record_key(id))))
  send_invitation(ARGV[2], j.pool, id)
  invited[#invited + 1] = id
  invited[#invited + 1] = j.pool
  return true
end

-- The owner of a job that ends now was lost when its lease ran out.
local function note_lost(key, j)
  local r = fields(key, 'life', 'first', 'worker')
  redis.call('HSET', key, 'life', with_event(r.life .. r.first, tonumber(j.lease), 'lost', j.k, r.worker), 'first', '')
end

local invited = {}
local ids = redis.call('ZRANGEBYSCORE', DUE, '-inf', int(NOW), 'LIMIT', 0, 50)
for _, id in ipairs(ids) do
  local key = record_key(id)
  local j = fields(key, 'status', 'lease', 'stop', 'deadline', 'pool', 'boarded', 'k', 'strikes', 'struck_at', 'deaths', 'invites',
    'fingerprint', 'unserved_since')
  local lease, deadline = tonumber(j.lease), tonumber(j.deadline)
  local expires = redis.call('PEXPIRETIME', key)
  if j.status ~= 'queued' and j.status ~= 'running' then
    redis.call('ZREM', DUE, id)
  elseif j.status == 'queued' then
    if NOW >= deadline then
      terminal_stop(id, 'expired')
    elseif not model_is_gone(id, key, j) then
      set_due(id, due_in_queue(j.k, deadline), expires)
    end
  elseif lease >= NOW then
    local stop = j.stop
    if stop == '' and NOW >= deadline then
      stop = 'expired'
      redis.call('HSET', key, 'stop', stop)
      redis.call('PUBLISH', P .. C.db .. ':o:' .. redis.call('HGET', key, 'incarnation'), id)
    end
    set_due(id, math.max(due_of(lease, stop, deadline), NOW + 1), expires)
  elseif in_grace then
    model_is_gone(id, key, j) -- the outage does not count
    set_due(id, math.max(tonumber(redis.call('GET', P .. 'grace') or 0), NOW) + 1, expires)
  elseif j.stop ~= '' then
    note_lost(key, j)
    terminal_stop(id, j.stop)
  elseif NOW >= deadline then
    note_lost(key, j)
    terminal_stop(id, 'expired')
  elseif not model_is_gone(id, key, j) then
    local strikes = (j.struck_at == j.k) and tonumber(j.strikes) + 1 or 1
    local last = strikes >= C.max_attempts or tonumber(j.deaths) + 1 >= C.max_deaths
    if j.boarded ~= '' and last then note_lost(key, j) end
    if not (j.boarded ~= '' and last and charge(id, 'its worker died or lost touch')) then
      -- the status stays running: the old owner may still renew. Invitations of one job thin out while none is taken.
      local invites = tonumber(j.invites == '' and 0 or j.invites)
      if invite(id, j, invited) then redis.call('HSET', key, 'invites', int(math.min(invites + 1, 10))) end
      set_due(id, NOW + math.min(C.invitation * 2 ^ invites, C.look_again), expires)
      Q.lose(id, j.pool, NOW + C.look_again + 2000)
    end
  end
end
table.insert(invited, 1, int(#ids))
return invited
