-- Delete a file, or what there is of an upload that did not come to its end (ARGV[3]: its number of chunks). ARGV[2]: id,
-- ARGV[4]: who asks.
-- Returns deleted, gone, or in_use: a batch that has not ended reads or writes it.
local id = ARGV[2]
local f = fields(file_key(id), 'chunks', 'batches', 'key')
if f.chunks == '' and ARGV[3] == '0' then return 'gone' end
local owner = f.key ~= '' and f.key or 'all'
if f.chunks ~= '' and ARGV[4] ~= '' and owner ~= ARGV[4] then return 'gone' end
if f.batches ~= '' and f.batches ~= '0' then return 'in_use' end
for n = 0, tonumber(f.chunks == '' and ARGV[3] or f.chunks) - 1 do redis.call('UNLINK', chunk_key(id, n)) end
redis.call('DEL', file_key(id))
unaccount(id)
redis.call('ZREM', files_of(owner), id)
return 'deleted'
