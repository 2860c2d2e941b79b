-- End a job that no owner rides: a task that cannot be run at all. ARGV[2]: id, ARGV[3]: the error as JSON. Returns ended or no.
local j = fields(KEYS[1], 'status')
if j.status ~= 'queued' then return 'no' end
terminal(ARGV[2], 'failed', 'error', ARGV[3], '')
return 'ended'
