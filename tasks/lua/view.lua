-- The object of GET /jobs/{id} as JSON for each id in ARGV[3..]; '' where there is none for ARGV[2], who asks.
local views = {}
for i = 3, #ARGV do views[#views + 1] = is_for(ARGV[2], ARGV[i]) and (job_view(ARGV[i]) or group_view(ARGV[i])) or '' end
return views
