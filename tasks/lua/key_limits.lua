-- What an API key may ask for: requests and tokens a minute, and jobs at once. A part of the scripts that accept what it asks.
-- Requests and tokens are counted second by second, so that the window slides: no minute holds more, wherever it begins.
-- `minute:<key>` has a field per second, "<requests> <tokens>"; `live:<key>` the jobs that have not ended, until they expire.
local MINUTE_S = 60
-- How long until jobs of a key have ended is told by so many of them; it is between these times, and this one where nobody knows.
local ENDS_LOOKED_AT = 64
local SHORTEST_WAIT, LONGEST_WAIT, UNKNOWN_WAIT = 1000, 120000, 10000

-- The seconds that still count, the oldest first, and those that do not any more.
local function minute_of(key)
  local raw, seconds, old = redis.call('HGETALL', minute_key(key)), {}, {}
  local first = math.floor(NOW / 1000) - MINUTE_S
  for i = 1, #raw, 2 do
    local at = tonumber(raw[i])
    if at < first then
      old[#old + 1] = raw[i]
    else
      local requests, tokens = string.match(raw[i + 1], '^(%d+) (%d+)$')
      seconds[#seconds + 1] = { at = at, requests = tonumber(requests), tokens = tonumber(tokens) }
    end
  end
  table.sort(seconds, function(a, b) return a.at < b.at end)
  return seconds, old
end

local function sum(seconds, what)
  local total = 0
  for _, second in ipairs(seconds) do total = total + second[what] end
  return total
end

-- Milliseconds until a second does not count any more.
local function until_gone(second) return (second.at + MINUTE_S + 1) * 1000 - NOW end

-- {limit, what is left, milliseconds until all of it is there again} as JSON; null where there is no limit.
local function left_json(seconds, what, limit)
  if limit == 0 then return 'null' end
  local last = nil
  for _, second in ipairs(seconds) do
    if second[what] > 0 then last = second end
  end
  return string.format('[%s,%s,%s]', int(limit), int(math.max(0, limit - sum(seconds, what))), int(last and until_gone(last) or 0))
end

-- Why so much more does not fit, as JSON {what, limit, used, asked, wait (ms)}: wait is -1 where it never will. nil where it does.
local function over(seconds, what, limit, asked)
  local used = sum(seconds, what)
  if limit == 0 or used + asked <= limit then return nil end
  local wait, rest = -1, used
  if asked <= limit then
    for _, second in ipairs(seconds) do
      rest = rest - second[what]
      if rest + asked <= limit then
        wait = until_gone(second)
        break
      end
    end
  end
  return string.format('{"what":%s,"limit":%s,"used":%s,"asked":%s,"wait":%s}', quote(what), int(limit), int(used), int(asked),
    int(wait))
end

local function live_jobs(key)
  redis.call('ZREMRANGEBYSCORE', live_key(key), '-inf', int(NOW))
  return redis.call('ZCARD', live_key(key))
end

-- Milliseconds until so many of a key's jobs have ended, by their ETAs.
local function until_ended(key, many)
  local etas = {}
  for _, id in ipairs(redis.call('ZRANGE', live_key(key), 0, ENDS_LOOKED_AT - 1)) do
    local _, eta = outlook_of(id, fields(record_key(id), 'status', 'pool', 'weight', 'k', 'lease'))
    if eta then etas[#etas + 1] = eta end
  end
  table.sort(etas)
  return math.max(SHORTEST_WAIT, math.min(LONGEST_WAIT, etas[many] or UNKNOWN_WAIT))
end

-- Count one request of a key, with the tokens of each of its jobs. `limits` is {rpm, tpm, jobs}, 0 for none of them; nil where
-- nothing is limited. Returns nil and what is left; or why it was refused, then nothing was counted, and what is left.
local function spend(key, limits, counted, num_jobs)
  if not limits then return nil, '' end
  local seconds, old = minute_of(key)
  local tokens = 0
  for _, number in ipairs(counted or {}) do tokens = tokens + tonumber(number) end
  local function left()
    return string.format('{"requests":%s,"tokens":%s}', left_json(seconds, 'requests', limits.rpm),
      left_json(seconds, 'tokens', limits.tpm))
  end
  local refused = over(seconds, 'requests', limits.rpm, 1) or over(seconds, 'tokens', limits.tpm, tokens)
  if not refused and limits.jobs > 0 and num_jobs > 0 then
    local live = live_jobs(key)
    if live + num_jobs > limits.jobs then
      refused = string.format('{"what":"jobs","limit":%s,"used":%s,"asked":%s,"wait":%s}', int(limits.jobs), int(live), int(num_jobs),
        num_jobs > limits.jobs and '-1' or int(math.ceil(until_ended(key, live + num_jobs - limits.jobs))))
    end
  end
  if refused then return refused, left() end
  if limits.rpm == 0 and limits.tpm == 0 then return nil, '' end
  local now_s = math.floor(NOW / 1000)
  local last = seconds[#seconds]
  if not last or last.at < now_s then
    last = { at = now_s, requests = 0, tokens = 0 }
    seconds[#seconds + 1] = last
  end
  last.requests, last.tokens = last.requests + 1, last.tokens + tokens
  if #old > 0 then redis.call('HDEL', minute_key(key), unpack(old)) end
  redis.call('HSET', minute_key(key), int(last.at), int(last.requests) .. ' ' .. int(last.tokens))
  redis.call('PEXPIREAT', minute_key(key), int(NOW + (MINUTE_S + 2) * 1000))
  return nil, left()
end

-- Jobs that were just accepted are among those that the key has at once, until their ends.
local function hold_live(R)
  if R.key == 'all' then return end
  local ids = { R.id }
  if R.group then
    for i = 1, #R.seeds do ids[i] = R.id .. '.' .. int(i - 1) end
  end
  for _, id in ipairs(ids) do
    local expires = redis.call('PEXPIRETIME', record_key(id))
    redis.call('ZADD', live_key(R.key), int(expires), id)
    keep_until(live_key(R.key), int(expires))
  end
end
