-- Sum up what was noted of jobs (`note` in ends.lua): what metrics count, as numbers that only rise, for each pool a hash.
-- Taken off the list and counted in one call, so any number of processes may do it. ARGV[2]: JSON {page: so many lines at
-- most, bounds: of each histogram, ascending}. Returns how many lines there were; with as many as a page there may be more.
-- A hash has, for each histogram, <name>:<class>:<bound> (how many were above the bound before it and not above this one)
-- and <name>:<class>:sum; the class is that of the priority, or 'all'.
local R = cjson.decode(ARGV[2])
local lines = redis.call('LRANGE', SEEN, 0, R.page - 1)
if #lines == 0 then return 0 end
redis.call('LTRIM', SEEN, #lines, -1)

local sums = {}
local function add(pool, field, n)
  sums[pool] = sums[pool] or {}
  sums[pool][field] = (sums[pool][field] or 0) + n
end

local function observe(pool, name, class, value)
  local bounds = R.bounds[name]
  local low, high = 1, #bounds + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if value <= bounds[middle] then high = middle else low = middle + 1 end
  end
  local series = name .. ':' .. class .. ':'
  add(pool, series .. (bounds[low] and int(bounds[low]) or 'inf'), 1)
  add(pool, series .. 'sum', value)
end

-- 1 is high, 5 normal, 9 low (tasks/priority.py).
local function class_of(priority)
  local number = tonumber(priority)
  return number < 5 and 'high' or number > 5 and 'low' or 'normal'
end

local KINDS = {}
-- A job rides for the first time.
function KINDS.q(rest)
  local priority, ms, pool = string.match(rest, '^(%d+) (%d+) (.*)$')
  observe(pool, 'queue', class_of(priority), tonumber(ms))
end
-- Its first token is written.
function KINDS.f(rest)
  local priority, ms, pool = string.match(rest, '^(%d+) (%d+) (.*)$')
  observe(pool, 'first', class_of(priority), tonumber(ms))
end
-- It was taken up again.
function KINDS.r(rest)
  local cause, pool = string.match(rest, '^(%S+) (.*)$')
  add(pool, 'recovered:' .. cause, 1)
end
-- It has ended.
function KINDS.e(rest)
  local status, how, priority, ms, prompt, cached, generated, pool = string.match(rest,
    '^(%S+) (%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  add(pool, 'ended:' .. status .. ':' .. how, 1)
  add(pool, 'prompt', tonumber(prompt))
  if cached ~= '0' then add(pool, 'cached', tonumber(cached)) end
  if status ~= 'succeeded' then return end
  observe(pool, 'whole', class_of(priority), tonumber(ms))
  observe(pool, 'prompt_length', 'all', tonumber(prompt))
  observe(pool, 'generated_length', 'all', tonumber(generated))
end

for _, line in ipairs(lines) do
  local read = KINDS[string.sub(line, 1, 1)]
  -- what a newer release notes besides is its own to count, and a line that cannot be read must hold up no other
  if read then pcall(read, string.sub(line, 3)) end
end
for pool, fields_of_pool in pairs(sums) do
  for field, n in pairs(fields_of_pool) do redis.call('HINCRBY', counted_key(pool), field, int(n)) end
  redis.call('PEXPIRE', counted_key(pool), COUNTED_KEPT_MS)
end
redis.call('PEXPIRE', GENERATED, COUNTED_KEPT_MS)
return #lines
