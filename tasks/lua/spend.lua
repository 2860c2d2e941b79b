-- Count a request of an API key that makes no job. ARGV[2]: JSON {key, limits}.
-- Returns {what is left of its minute, '' or why it is refused, as JSON}: then it was not counted.
local R = cjson.decode(ARGV[2])
local refused, left = spend(R.key, R.limits, nil, 0)
return { left, refused or '' }
