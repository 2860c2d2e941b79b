-- Send messages for the webhooks that are due, and say that a worker that delivers them lives. ARGV[2]: template of the
-- message; ARGV[3]: most messages in the broker; ARGV[4]: the worker, ARGV[5]: for how many ms this counts.
-- Returns {messages sent, ms until it makes sense to look again, or -1}.
local workers = P .. 'hook:workers'
redis.call('ZADD', workers, int(NOW + ARGV[5]), ARGV[4])
redis.call('ZREMRANGEBYSCORE', workers, '-inf', int(NOW))
keep_until(workers, int(NOW + ARGV[5]))
return send_due_webhooks(ARGV[2], tonumber(ARGV[3]))
