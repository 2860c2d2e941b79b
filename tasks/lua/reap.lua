-- Look at what is due, at most 50 a call; a compare-and-set each, right with any number of reapers.
-- Returns {number looked at, ids to invite…}: running jobs whose lease ran out are invited here, never from the wait set.
local tick_key = P .. 'tick'
local tick = tonumber(redis.call('GET', tick_key) or 0)
if NOW - tick > C.tick_stale then redis.call('SET', P .. 'grace', int(NOW + C.grace), 'PX', int(C.grace + 600000)) end
redis.call('SET', tick_key, int(NOW), 'PX', 600000)
local in_grace = not past_grace()

local invited = {}
local ids = redis.call('ZRANGEBYSCORE', DUE, '-inf', int(NOW), 'LIMIT', 0, 50)
for _, id in ipairs(ids) do
  local key = record_key(id)
  local j = fields(key, 'status', 'lease', 'stop', 'deadline', 'pool', 'boarded', 'k', 'strikes', 'struck_at', 'deaths', 'invites')
  if j.status ~= 'queued' and j.status ~= 'running' then
    redis.call('ZREM', DUE, id)
  else
    local lease, deadline = tonumber(j.lease), tonumber(j.deadline)
    local expires = redis.call('PEXPIRETIME', key)
    local out = j.status == 'running' and lease < NOW
    if NOW >= deadline and j.stop == '' and (j.status == 'queued' or (out and not in_grace)) then
      terminal_stop(id, 'expired')
    elseif j.status == 'queued' then
      set_due(id, deadline, expires)
    elseif not out then
      local stop = j.stop
      if stop == '' and NOW >= deadline then
        stop = 'expired'
        redis.call('HSET', key, 'stop', stop)
        redis.call('PUBLISH', P .. C.db .. ':o:' .. redis.call('HGET', key, 'incarnation'), id)
      end
      set_due(id, math.max(due_of('running', lease, stop, deadline), NOW + 1), expires)
    elseif in_grace then
      set_due(id, math.max(tonumber(redis.call('GET', P .. 'grace') or 0), NOW) + 1, expires)
    elseif j.stop ~= '' then
      terminal_stop(id, j.stop)
    else
      local strikes = (j.struck_at == j.k) and tonumber(j.strikes) + 1 or 1
      local last = strikes >= C.max_attempts or tonumber(j.deaths) + 1 >= C.max_deaths
      if not (j.boarded ~= '' and last and charge(id, 'its worker died or lost touch')) then
        -- the status stays running: the old owner may still renew. Invitations of one job thin out while none is taken.
        local invites = tonumber(j.invites == '' and 0 or j.invites)
        set_due(id, NOW + math.min(C.invitation * 2 ^ invites, 30000), expires)
        if has_worker(j.pool, 'ready') then
          redis.call('HSET', key, 'invites', int(math.min(invites + 1, 10)))
          redis.call('ZADD', inv_key(j.pool), int(NOW), id)
          keep_until(inv_key(j.pool), int(expires))
          invited[#invited + 1] = id
          invited[#invited + 1] = j.pool
        end
      end
    end
  end
end
table.insert(invited, 1, int(#ids))
return invited
