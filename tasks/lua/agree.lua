-- A process says that it lives and which version of the ledger it reads and writes at best (C.version). What is written is
-- the oldest of those that live: a release reads what the one before it wrote, so records get the new version when nobody
-- is left who could not read them. After an outage nobody has been heard, so grace has to pass first.
-- Returns the version that is written from now on. One that C.version cannot work with is returned as it is, and the
-- process does not count.
local written = tonumber(redis.call('GET', SCHEMA) or 0)
if written > C.version or (written > 0 and written < C.version - 1) then return written end
local versions = P .. 'versions'
redis.call('ZADD', versions, int(NOW), int(C.version))
redis.call('ZREMRANGEBYSCORE', versions, '-inf', int(NOW - C.version_gone))
redis.call('PEXPIRE', versions, int(2 * C.version_gone))
if written == C.version or (written > 0 and not past_grace()) then return written end
local oldest = C.version
for _, version in ipairs(redis.call('ZRANGE', versions, 0, -1)) do oldest = math.min(oldest, tonumber(version)) end
if oldest > written then
  written = oldest
  redis.call('SET', SCHEMA, int(written))
end
return written
