-- Invite the next waiting jobs of a pool. ARGV[2]: pool; ARGV[3], ARGV[4]: an incarnation and its free slots, or ''.
-- Returns the ids to invite; a message that is lost is sent again after 3 s.
if ARGV[3] ~= '' and redis.call('EXISTS', worker_key(ARGV[3])) == 1 then
  redis.call('HSET', worker_key(ARGV[3]), 'free', ARGV[4])
end
return invite_waiting(ARGV[2])
