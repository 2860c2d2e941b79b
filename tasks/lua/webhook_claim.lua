-- Begin an attempt to deliver the event of a job's end: one at a time, and none before its time. ARGV[2]: id, ARGV[3]: a
-- nonce made for this attempt, ARGV[4]: ms after which another worker may try, since this one has died.
-- Returns {verdict, …}: ok with number of the attempt, URL, ms of the end, the job's object as JSON, and its trace; or gone, live (the
-- job has not ended), over (delivered or given up), taken, early, newer (the record is of another release).
local id, key = ARGV[2], KEYS[1]
local j = fields(key, 'v', 'status', 'webhook', 'hook', 'hook_n', 'hook_nonce', 'hook_lease', 'hook_began', 'hook_next', 'finished_at',
  'idem', 'trace')
if j.webhook == '' or j.hook ~= '' then
  leave_outbox(id)
  return { j.hook ~= '' and 'over' or 'gone' }
end
if is_live(j.status) then return { 'live' } end
if tonumber(j.v) > C.version then return { 'newer' } end

if j.hook_nonce ~= ARGV[3] then
  if j.hook_nonce ~= '' and NOW < tonumber(j.hook_lease) then return { 'taken' } end
  if j.hook_nonce ~= '' then
    note_attempt(key, j.hook_n, j.hook_began, '', 'interrupted: the worker that made this attempt died or lost touch',
      NOW - tonumber(j.hook_began))
    if NOW >= tonumber(j.finished_at) + C.hook_span then
      end_webhook(id, key, 'failed', j.idem)
      return { 'over' }
    end
  elseif j.hook_next ~= '' and NOW < tonumber(j.hook_next) then
    return { 'early' }
  end
  j.hook_n = int(tonumber(j.hook_n == '' and 0 or j.hook_n) + 1)
  local lease = NOW + tonumber(ARGV[4])
  redis.call('HSET', key, 'hook_n', j.hook_n, 'hook_nonce', ARGV[3], 'hook_lease', int(lease), 'hook_began', int(NOW))
  into_outbox(id, lease, redis.call('PEXPIRETIME', key))
end
return { 'ok', j.hook_n, j.webhook, j.finished_at, job_view(id), j.trace }
