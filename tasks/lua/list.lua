-- A page of a key's jobs, newest first. ARGV[2]: index key, ARGV[3]: cursor or '+inf', ARGV[4]: size.
-- Returns {next cursor or '', view, view, …}; what has expired is dropped from the index on the way.
local index, cursor, size = P .. 'jobs:' .. ARGV[2], ARGV[3], tonumber(ARGV[4])
local views, last, more = {}, '', false
while true do
  local page = redis.call('ZRANGE', index, cursor, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, size + 1, 'WITHSCORES')
  if #page == 0 then break end
  for i = 1, #page, 2 do
    if #views == size then
      more = true
      break
    end
    local view = job_view(page[i]) or group_view(page[i])
    cursor = '(' .. page[i + 1]
    if view then
      views[#views + 1] = view
      last = page[i + 1]
    else
      redis.call('ZREM', index, page[i])
    end
  end
  if more or #page < (size + 1) * 2 then break end
end
table.insert(views, 1, more and last or '')
return views
