-- One chunk of a file that is uploaded. ARGV[2]: id, ARGV[3]: number of the chunk, ARGV[4]: its bytes.
-- Until the upload has ended the chunks stay for C.upload ms; a chunk that is sent twice counts once.
-- Returns {ok}, or {full, bytes of all files}: nothing was written.
forget_expired_files()
local id, key = ARGV[2], chunk_key(ARGV[2], ARGV[3])
local more = #ARGV[4] - redis.call('STRLEN', key)
if files_total() + more > C.files_most then return { 'full', int(files_total()) } end
redis.call('SET', key, ARGV[4], 'PX', int(C.upload))
account(id, more, NOW + C.upload)
return { 'ok' }
