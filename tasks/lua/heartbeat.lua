-- A worker says that it lives. KEYS: none of a job. ARGV[2]: JSON {incarnation, pools, ttl, fields}.
-- Returns 1 where it turned ready or has more free slots than before: then its pools are pumped.
local R = cjson.decode(ARGV[2])
local key = worker_key(R.incarnation)
local before = fields(key, 'state', 'free')
local args = {}
for name, value in pairs(R.fields) do
  args[#args + 1] = name
  args[#args + 1] = value
end
redis.call('HSET', key, unpack(args))
redis.call('PEXPIRE', key, int(R.ttl))
for _, pool in ipairs(R.pools) do
  local members = pool_workers_key(pool)
  redis.call('ZREMRANGEBYSCORE', members, '-inf', int(NOW - 1))
  redis.call('ZADD', members, int(NOW + R.ttl), R.incarnation)
  redis.call('PEXPIRE', members, int(R.ttl + 60000))
end
if R.fields.state ~= 'ready' then return 0 end
if before.state ~= 'ready' then return 1 end
return tonumber(R.fields.free) > tonumber(before.free == '' and 0 or before.free) and 1 or 0
