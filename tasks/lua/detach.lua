-- A client no longer waits for a job. ARGV[2]: id, ARGV[3]: member or ''. Returns how many others do.
local key = P .. 'att:' .. ARGV[2]
redis.call('ZREM', key, ARGV[3])
redis.call('ZREMRANGEBYSCORE', key, '-inf', int(NOW))
return redis.call('ZCARD', key)
