-- Accepted means recorded: one job, or a group with all its children. A part of the scripts that accept.

-- A step of priority (0 first, 9 last) is worth so many microseconds of waiting. That bounds what priorities do: a job is
-- overtaken only by those that come within the difference, and nobody starves.
local PRIORITY_STEP_US = 150000000
local NORMAL = 5

-- Where a request's first job stands in the order of all: when it came, moved by its priority.
local function first_order(R, place) return NOW_US + place + (R.priority - NORMAL) * PRIORITY_STEP_US end

-- R: the request (tasks/calls.py), inputs: the input of each job as JSON, kept verbatim; place: microseconds behind now,
-- so that what one call accepts keeps its order. The caller has seen that nothing has this id.
local function accept(R, inputs, place)
  local deadline = NOW + R.deadline
  if R.latest then deadline = math.min(deadline, R.latest) end
  local expires = int(deadline + kept_for(R.idem))
  local first = first_order(R, place)
  local version = version_to_write()

  local function record(id, i, group)
    -- lines of batches wait outside of the caps: the feeder takes only what there is room for
    local weight = Q.weigh(R.tokens[i], R.max, R.default_tokens ~= '', R.batch == '', R.key)
    redis.call('HSET', record_key(id), 'v', version, 'id', id, 'status', 'queued', 'epoch', '0', 'owner', '', 'lease', '0', 'stop', '',
      'k', '0', 'claims', '0', 'claim_k', '0', 'strikes', '0', 'deaths', '0', 'struck_at', '-1', 'boarded', '', 'died_gen', '',
      'params', R.params, 'seed', R.seeds[i], 'input', inputs[i], 'fingerprint', '', 'pool', R.pool, 'model', R.model,
      'deadline', int(deadline), 'created_at', int(NOW), 'order', int(first + i), 'priority', int(R.priority), 'group', group,
      'idem', group == '' and R.idem or '', 'native', R.native, 'metadata', group == '' and R.metadata or '', 'default_tokens',
      R.default_tokens, 'user', R.user, 'request', group == '' and R.request or '', 'batch', group == '' and R.batch or '',
      'key', R.key, 'counted', R.counted and R.counted[i] or '', 'weight', weight)
    if R.trace then redis.call('HSET', record_key(id), 'trace', R.trace) end
    redis.call('SET', text_key(id), '')
    redis.call('PEXPIREAT', record_key(id), expires)
    redis.call('PEXPIREAT', text_key(id), expires)
    Q.join(id, R.pool, weight, int(first + i), tonumber(expires))
    set_due(id, deadline, tonumber(expires))
  end

  if R.group then
    redis.call('HSET', group_key(R.id), 'v', version, 'id', R.id, 'status', 'queued', 'n', int(#R.seeds), 'left', int(#R.seeds),
      'model', R.model, 'pool', R.pool, 'seed', R.seed, 'created_at', int(NOW), 'deadline', int(deadline), 'priority',
      int(R.priority), 'idem', R.idem, 'metadata', R.metadata, 'request', R.request or '', 'batch', R.batch,
      'key', R.key)
    redis.call('PEXPIREAT', group_key(R.id), expires)
    for i = 1, #R.seeds do record(R.id .. '.' .. int(i - 1), i, R.id) end
  else
    record(R.id, 1, '')
  end
  if R.idem ~= '' then
    redis.call('HSET', idem_key(R.idem), 'id', R.id, 'body', R.body)
    redis.call('PEXPIREAT', idem_key(R.idem), expires)
  end
end
