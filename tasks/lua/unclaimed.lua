-- A worker took an invitation and could not claim the job: the next pump may invite it again. ARGV[2]: id.
local pool = redis.call('HGET', KEYS[1], 'pool')
if pool then redis.call('ZREM', inv_key(pool), ARGV[2]) end
return pool or ''
