-- The only one that invites waiting jobs. ARGV[2]: pool; ARGV[3], ARGV[4]: an incarnation and its free slots, or ''.
-- Returns the ids to invite; their messages are sent outside, and a message that is lost is sent again after 3 s.
-- So few messages are in the broker that the wait set alone decides the order: the free slots and two more. What lies in
-- the broker counts too, or full workers would have the same jobs invited again every 3 s.
local pool = ARGV[2]
if ARGV[3] ~= '' and redis.call('EXISTS', worker_key(ARGV[3])) == 1 then
  redis.call('HSET', worker_key(ARGV[3]), 'free', ARGV[4])
end
local free, ready, prints = 0, false, {}
for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', pool_workers_key(pool), int(NOW), '+inf')) do
  local w = fields(worker_key(incarnation), 'state', 'free', 'fingerprint')
  if w.state == 'ready' then
    ready = true
    local slots = tonumber(w.free == '' and 0 or w.free)
    free = free + slots
    if slots > 0 then prints[w.fingerprint] = true end
  end
end
if not ready then return {} end
local young = NOW - C.invitation
local inv = inv_key(pool)
local pending = math.max(redis.call('ZCOUNT', inv, int(young), '+inf'), redis.call('LLEN', queue_key(pool)))
local room = free + 2 - pending
local invited, offset = {}, 0
while room > 0 do
  local page = redis.call('ZRANGE', wait_key(pool), offset, offset + 31)
  if #page == 0 then break end
  for _, id in ipairs(page) do
    local mark = redis.call('ZSCORE', inv, id)
    if not mark or tonumber(mark) < young then
      local j = fields(record_key(id), 'fingerprint', 'k', 'status')
      if j.status ~= 'queued' then
        redis.call('ZREM', wait_key(pool), id)
        offset = offset - 1
      elseif free == 0 or j.fingerprint == '' or j.k == '0' or prints[j.fingerprint] then
        redis.call('ZADD', inv, int(NOW), id)
        invited[#invited + 1] = id
        room = room - 1
        if room == 0 then break end
      end
    end
  end
  offset = offset + #page
end
if #invited > 0 then keep_until(inv, int(NOW + C.deadline_most + C.retention)) end
return invited
