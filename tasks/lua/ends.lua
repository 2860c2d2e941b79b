-- The one end of a job and of a group, and what leads to it: stops, deaths. Also the owner's fence.

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
