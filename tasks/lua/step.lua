-- One decoding step of all slots: each token once, in order, fenced. Without tokens it renews, with a status it finishes.
-- ARGV[2]: number of slots; then 13 arguments a slot (see Ledger.step). Each slot in a pcall of its own: an error in one
-- must not skip the next, and there is no rollback.
-- Returns, per slot, {verdict, k, stop}: ok, at (the ledger holds k tokens: send again from there), ended (under this
-- owner; its status in the place of stop), fenced (another owns it, or it is over), error (its text in the place of stop).
local WIDTH = 13
-- Tokens that this call has written, by pool.
local written = {}

local function one(key, a)
  local id, epoch, nonce = ARGV[a], ARGV[a + 1], ARGV[a + 2]
  local board, prompts = ARGV[a + 3], ARGV[a + 4]
  local first, count, data, text = tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6]), ARGV[a + 7], ARGV[a + 8]
  local final, finish_reason, tail, error = ARGV[a + 9], ARGV[a + 10], ARGV[a + 11], ARGV[a + 12]
  local j = fields(key, 'status', 'epoch', 'owner', 'k', 'stop', 'deadline', 'pool', 'lease', 'boarded')
  if not owned(j, epoch, nonce) then
    local mine = j.owner == nonce and tonumber(j.epoch == '' and -1 or j.epoch) == tonumber(epoch) + 1
    if mine and j.status ~= 'running' and j.status ~= 'queued' then return { 'ended', j.k, j.status } end
    return { 'fenced', j.k, '' }
  end
  local k, deadline, stop = tonumber(j.k), tonumber(j.deadline), j.stop
  if stop == '' and NOW >= deadline then stop = 'expired' end
  local lease = NOW + C.lease
  redis.call('HSET', key, 'lease', int(lease), 'stop', stop)
  set_due(id, due_of(lease, stop, deadline), redis.call('PEXPIRETIME', key))
  redis.call('ZREM', inv_key(j.pool), id)
  -- its owner was believed to be gone
  if tonumber(j.lease) < NOW then redis.call('ZREM', lost_key(j.pool), id) end
  if prompts ~= '' then
    local tokens, cached = string.match(prompts, '^(%d+) (%d+)$')
    redis.call('HSET', key, 'prompt_tokens', tokens)
    -- of its first ride: what a later one finds in a cache may be what that one has computed
    if cached ~= '0' and redis.call('HGET', key, 'rides') == '1' then redis.call('HSET', key, 'cached_tokens', cached) end
  end
  if first > 0 and first ~= k + 1 then return { 'at', j.k, stop } end
  if board ~= '' then redis.call('HSET', key, 'boarded', j.k) end
  if count > 0 then
    if k == 0 then
      local f = redis.call('HMGET', key, 'created_at', 'priority')
      note('f ' .. since_accepted(f[1], f[2] or '') .. j.pool)
    end
    written[j.pool] = (written[j.pool] or 0) + count
    k = k + count
    redis.call('XADD', log_key(id), 'NOMKSTREAM', epoch .. '-' .. int(k), 'd', data)
    if j.boarded == j.k then
      redis.call('HSET', key, 'k', int(k), 'first', int(NOW) .. ' first_token ' .. int(k) .. ' \n')
    else
      redis.call('HSET', key, 'k', int(k))
    end
    if text ~= '' then redis.call('APPEND', text_key(id), text) end
    publish(id, data)
  end
  if final ~= '' then
    terminal(id, final, finish_reason, error ~= '' and error or STOP_ERROR[final] or '', tail)
    return { 'ended', int(k), final }
  end
  return { 'ok', int(k), stop }
end

local results = {}
for slot = 1, tonumber(ARGV[2]) do
  local a = 3 + (slot - 1) * WIDTH
  local fine, result = pcall(one, KEYS[slot], a)
  if not fine then
    result = { 'error', '', type(result) == 'table' and (result.err or 'unknown') or tostring(result) }
  end
  results[slot] = result
end
for pool, count in pairs(written) do
  if redis.call('HINCRBY', GENERATED, pool, count) == count then redis.call('PEXPIRE', GENERATED, COUNTED_KEPT_MS) end
end
return results
