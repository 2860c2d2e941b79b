-- Invite the next waiting jobs of a pool. ARGV[2]: pool; ARGV[3]: template of the message; ARGV[4], ARGV[5]: an
-- incarnation and its free slots, or ''. Returns the ids that were invited; a message that is lost is sent again after 3 s.
if ARGV[4] ~= '' and redis.call('EXISTS', worker_key(ARGV[4])) == 1 then
  redis.call('HSET', worker_key(ARGV[4]), 'free', ARGV[5])
end
return invite_waiting(ARGV[2], ARGV[3])
