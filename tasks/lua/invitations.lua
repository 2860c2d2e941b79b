-- Messages to the workers: that a job waits, or anything else that somebody might look at.

-- A Celery message, into the broker's list. `template` is kombu's message for no task in particular
-- (tasks/invitations.py); '' sends none, for a caller that has a broker of its own.
local function send_message(template, queue, task)
  if template == '' then return end
  local fillings = { id = quote(task):sub(2, -2), queue = quote(queue):sub(2, -2),
    tag = quote(task .. ':' .. int(NOW_US)):sub(2, -2) }
  redis.call('LPUSH', queue, (template:gsub('@(%l+)@', fillings)))
end

-- The invitation to a job.
local function send_invitation(template, pool, id) send_message(template, queue_key(pool), id) end

-- The next waiting jobs of a pool, in order, marked as invited and with their messages sent.
-- So few messages are in the broker that the wait set alone decides the order: the free slots and two more. What lies in
-- the broker counts too, or full workers would have the same jobs invited again every 3 s.
local function invite_waiting(pool, template)
  local crew = Q.crew(pool)
  if not crew.ready then return {} end
  Q.check(pool)
  local young = NOW - C.invitation
  local inv = inv_key(pool)
  local pending = math.max(redis.call('ZCOUNT', inv, int(young), '+inf'), redis.call('LLEN', queue_key(pool)))
  local room = crew.free + 2 - pending
  local invited, next_job = {}, Q.in_order(pool, young)
  while room > 0 do
    local id, queue = next_job()
    if not id then break end
    local mark = redis.call('ZSCORE', inv, id)
    if not mark or tonumber(mark) < young then
      local j = fields(record_key(id), 'fingerprint', 'k', 'status', 'weight', 'charged')
      if j.status ~= 'queued' then
        leave_queues(id, pool)
        queue.offset = queue.offset - 1
      elseif crew.free == 0 or j.fingerprint == '' or j.k == '0' or crew.prints[j.fingerprint] then
        redis.call('ZADD', inv, int(NOW), id)
        send_invitation(template, pool, id)
        invited[#invited + 1] = id
        queue.time = queue.time + (Q.charge(pool, id, j.weight, j.charged) or 0)
        queue.served = nil
        room = room - 1
      end
    end
  end
  if #invited > 0 then keep_until(inv, int(NOW + C.deadline_most + C.retention)) end
  return invited
end
