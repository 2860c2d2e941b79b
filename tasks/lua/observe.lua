-- What a worker has measured of its steps since it last said so, added to what is counted of its pool. ARGV[2]: JSON
-- {incarnation, pool, number, add: {field of the hash: by how much}}. The numbers of one worker rise, so that a report that
-- comes twice counts once; but for one whose answer was lost with an outage that outlasts its worker's heartbeat.
-- Returns 1 where it is counted, now or before; 0 for a worker without a heartbeat, which says it again.
local R = cjson.decode(ARGV[2])
local key = worker_key(R.incarnation)
local w = fields(key, 'name', 'reported')
if w.name == '' then return 0 end
if R.number <= tonumber(w.reported == '' and 0 or w.reported) then return 1 end
redis.call('HSET', key, 'reported', int(R.number))
for field, n in pairs(R.add) do redis.call('HINCRBY', counted_key(R.pool), field, int(n)) end
redis.call('PEXPIRE', counted_key(R.pool), COUNTED_KEPT_MS)
return 1
