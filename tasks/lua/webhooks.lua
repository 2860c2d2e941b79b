-- Webhooks: the event of each end, delivered at least once. A part of the scripts of deliveries.
-- HOOKS is the outbox and the truth; a Celery message only says that somebody might look at one of its jobs. It may be lost,
-- doubled or late: a claim decides who delivers. In the record: `webhook` the URL, `hook` delivered or failed, once that is
-- known, `hook_n` attempts so far, `hook_<n>` the n-th as JSON, `hook_next` when the next may begin; and of the attempt that
-- runs `hook_nonce`, `hook_lease`, `hook_began`.
local HOOK_QUEUE = 'carpool.webhooks'
-- a message that nobody took for so long counts as lost
local HOOK_MESSAGE = 10000
-- how often a job that lives is looked at: only an end that a process wrote which knows of no webhooks is found by that
local HOOK_LOOK = 60000
local HOOK_PAGE = 500

local function is_live(status) return status == 'queued' or status == 'running' end

-- Nothing is left to be done for this job's webhook.
local function leave_outbox(id) redis.call('ZREM', HOOKS, id) end

-- A job that was just accepted has a webhook: it is in the outbox from now on, and kept for as long as its event needs.
local function promise_webhook(R)
  local key = record_key(R.id)
  local at = tonumber(redis.call('HGET', key, 'deadline')) + kept_after_end(R.idem, R.webhook)
  redis.call('HSET', key, 'webhook', R.webhook)
  expire_job(R.id, int(at))
  if R.idem ~= '' then redis.call('PEXPIREAT', idem_key(R.idem), int(at)) end
  into_outbox(R.id, NOW + HOOK_LOOK, at)
end

-- Send messages for what is due, the longest due first, as long as fewer than `most` lie in the broker: what is there
-- already keeps everybody busy, and the outbox alone keeps the order.
-- Returns {messages sent, ms until it makes sense to look again, or -1: who settles an attempt looks, or there is nothing}.
local function send_due_webhooks(template, most)
  local room, sent = most - redis.call('LLEN', HOOK_QUEUE), 0
  if room > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', HOOKS, '-inf', int(NOW), 'LIMIT', 0, HOOK_PAGE)) do
      local j = fields(record_key(id), 'v', 'status', 'webhook', 'hook')
      if j.webhook == '' or j.hook ~= '' then
        leave_outbox(id)
      elseif is_live(j.status) then
        into_outbox(id, NOW + HOOK_LOOK, redis.call('PEXPIRETIME', record_key(id)))
      elseif tonumber(j.v) > C.version then
        into_outbox(id, NOW + HOOK_MESSAGE, redis.call('PEXPIRETIME', record_key(id))) -- a newer release delivers it
      elseif room > 0 then
        into_outbox(id, NOW + HOOK_MESSAGE, redis.call('PEXPIRETIME', record_key(id)))
        send_message(template, HOOK_QUEUE, event_id(id))
        room, sent = room - 1, sent + 1
      end
    end
  end
  local first = room > 0 and redis.call('ZRANGE', HOOKS, 0, 0, 'WITHSCORES') or {}
  return { sent, first[2] and int(math.max(0, tonumber(first[2]) - NOW)) or '-1' }
end

-- The event was delivered, or is given up: from now on the job is kept like any other.
local function end_webhook(id, key, status, idem)
  redis.call('HSET', key, 'hook', status, 'hook_nonce', '')
  leave_outbox(id)
  local at = NOW + kept_for(idem)
  if at < redis.call('PEXPIRETIME', key) then
    expire_job(id, int(at))
    if idem ~= '' then redis.call('PEXPIREAT', idem_key(idem), int(at)) end
  end
end

-- The end of an attempt, for the delivery log.
local function note_attempt(key, n, began, status_code, error, duration)
  redis.call('HSET', key, 'hook_' .. n, string.format('{"at":%s,"status_code":%s,"error":%s,"duration_ms":%s}',
    seconds_or_null(began), number_or_null(status_code), quote_or_null(error), int(duration)))
  local old = tonumber(n) - ATTEMPTS_SHOWN
  if old > 0 then redis.call('HDEL', key, 'hook_' .. int(old)) end
end
