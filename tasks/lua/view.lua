-- The object of GET /jobs/{id} as JSON for each id in ARGV[2..]; '' where there is none.
local views = {}
for i = 2, #ARGV do views[#views + 1] = job_view(ARGV[i]) or group_view(ARGV[i]) or '' end
return views
