-- The end of an attempt. ARGV[2]: id, ARGV[3]: its nonce, ARGV[4]: delivered, failed (for good), retry, or busy (nothing was
-- sent); ARGV[5]: the HTTP status or '', ARGV[6]: the error or '', ARGV[7]: ms that it took, ARGV[8]: ms until the next one;
-- ARGV[9], ARGV[10]: template and most messages, to send what is due next in the same call.
-- Returns {verdict, messages sent, …}: delivered, failed, pending, or fenced (another attempt has begun, or this end was told).
local id, key, outcome = ARGV[2], KEYS[1], ARGV[4]
local j = fields(key, 'webhook', 'hook_n', 'hook_nonce', 'hook_began', 'finished_at', 'idem')

local function settle()
  if j.webhook == '' or j.hook_nonce ~= ARGV[3] then return 'fenced' end
  redis.call('HSET', key, 'hook_nonce', '')
  local next_at = NOW + tonumber(ARGV[8])
  if outcome == 'busy' then
    redis.call('HSET', key, 'hook_n', int(tonumber(j.hook_n) - 1))
    into_outbox(id, next_at, redis.call('PEXPIRETIME', key))
    return 'pending'
  end
  note_attempt(key, j.hook_n, j.hook_began, ARGV[5], ARGV[6], tonumber(ARGV[7]))
  -- the last attempt comes when the span is over; within a second of that it has come
  local last = tonumber(j.finished_at) + C.hook_span
  if outcome == 'retry' and NOW < last - 1000 then
    next_at = math.min(next_at, last)
    redis.call('HSET', key, 'hook_next', int(next_at))
    into_outbox(id, next_at, redis.call('PEXPIRETIME', key))
    return 'pending'
  end
  local over = outcome == 'delivered' and 'delivered' or 'failed'
  end_webhook(id, key, over, j.idem)
  return over
end

local verdict = settle()
local sent = send_due_webhooks(ARGV[9], tonumber(ARGV[10]))
return { verdict, sent[1], sent[2] }
