-- Clients that wait for jobs: entries that last ARGV[2] ms unless they are renewed. ARGV[3..]: id, member, id, member…
-- A job that does not exist gets no key.
for a = 3, #ARGV, 2 do
  local id = ARGV[a]
  if redis.call('EXISTS', record_key(id), group_key(id)) > 0 then
    local key = P .. 'att:' .. id
    redis.call('ZADD', key, int(NOW + ARGV[2]), ARGV[a + 1])
    redis.call('PEXPIRE', key, ARGV[2])
  end
end
return 'ok'
