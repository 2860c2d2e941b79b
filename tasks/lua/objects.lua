-- Jobs and groups as they are shown, as JSON.

-- As OpenAI says it; the details only where a cache had tokens of the prompt.
local function usage_json(prompt_tokens, k, cached)
  if prompt_tokens == '' then
    return string.format('{"prompt_tokens":null,"completion_tokens":%s,"total_tokens":null}', k)
  end
  local details = ''
  if cached ~= '' and cached ~= '0' then details = string.format(',"prompt_tokens_details":{"cached_tokens":%s}', cached) end
  return string.format('{"prompt_tokens":%s,"completion_tokens":%s,"total_tokens":%s%s}', prompt_tokens, k,
    int(tonumber(prompt_tokens) + tonumber(k)), details)
end

local function urls_json(id)
  return string.format('{"self":"/jobs/%s","stream":"/jobs/%s/stream","cancel":"/jobs/%s/cancel"}', id, id, id)
end

-- What is shown of a job's webhook, as JSON: where its event goes (a query may hold a secret of its receiver), how that
-- stands, and the last attempts. `hook_<n>` is the n-th attempt (webhooks.lua).
local ATTEMPTS_SHOWN = 50
local function webhook_json(id, has_ended)
  local key = record_key(id)
  local h = fields(key, 'webhook', 'hook', 'hook_n', 'hook_next', 'finished_at')
  if h.webhook == '' then return 'null' end
  local last = tonumber(h.hook_n == '' and 0 or h.hook_n)
  local attempts = {}
  for n = math.max(1, last - ATTEMPTS_SHOWN + 1), last do
    attempts[#attempts + 1] = redis.call('HGET', key, 'hook_' .. int(n)) or nil
  end
  local status = not has_ended and 'waiting' or (h.hook ~= '' and h.hook or 'pending')
  local next_at = status == 'pending' and (h.hook_next ~= '' and h.hook_next or h.finished_at) or ''
  return table.concat({ '{"url":', quote((h.webhook:gsub('%?.*$', '?…'))), ',"event_id":', quote(event_id(id)), ',"status":',
    quote(status), ',"attempts":[', table.concat(attempts, ','), '],"next_attempt_at":', seconds_or_null(next_at), '}' })
end

local function int_or_null(n) return n and int(n) or 'null' end
local function eta_json(ms) return ms and string.format('%.1f', ms / 1000) or 'null' end

-- Place in the queue and ms until the end that can be expected, each nil where there is none. `j`: status, pool, weight, k, lease.
local function outlook_of(id, j)
  if j.status == 'queued' then return Q.outlook(j.pool, id, j.weight) end
  if j.status == 'running' and tonumber(j.lease) >= NOW then return nil, Q.riding_eta_ms(j.pool, j.weight, tonumber(j.k)) end
end

-- The object of GET /jobs/{id} for one job, as JSON; false where there is no record.
local function job_view(id)
  local j = fields(record_key(id), 'status', 'model', 'seed', 'created_at', 'started_at', 'finished_at', 'rides', 'k',
    'finish_reason', 'prompt_tokens', 'error', 'stop', 'pool', 'metadata', 'group', 'deadline', 'deaths', 'priority', 'webhook',
    'weight', 'lease', 'cached_tokens')
  if j.status == '' then return false end
  local place, eta = outlook_of(id, j)
  return table.concat({
    '{"id":', quote(id), ',"object":"job","status":', quote(j.status), ',"model":', quote(j.model), ',"seed":', j.seed,
    ',"created_at":', seconds_or_null(j.created_at), ',"started_at":', seconds_or_null(j.started_at),
    ',"finished_at":', seconds_or_null(j.finished_at), ',"deadline_at":', seconds_or_null(j.deadline),
    ',"priority":', j.priority == '' and '5' or j.priority,
    ',"queue_position":', int_or_null(place), ',"eta_s":', eta_json(eta), ',"attempts":', j.rides == '' and '0' or j.rides,
    ',"cancel_requested":', j.stop == 'cancelled' and 'true' or 'false',
    ',"text":', quote(redis.call('GET', text_key(id)) or ''), ',"finish_reason":', quote_or_null(j.finish_reason),
    ',"usage":', usage_json(j.prompt_tokens, j.k, j.cached_tokens), ',"error":', number_or_null(j.error),
    ',"metadata":', number_or_null(j.metadata), ',"group":', quote_or_null(j.group), ',"webhook":',
    j.webhook == '' and 'null' or webhook_json(id, j.status ~= 'queued' and j.status ~= 'running'), ',"urls":', urls_json(id), '}'
  })
end

-- The same for a group: its own state, and the ids and texts of its children, in order.
local function group_view(id)
  local g = fields(group_key(id), 'status', 'model', 'seed', 'created_at', 'started_at', 'finished_at', 'n', 'left', 'metadata',
    'error', 'deadline', 'finish_reason', 'stop', 'priority')
  if g.status == '' then return false end
  local children, texts, prompt_tokens, cached, tokens, started, riding = {}, {}, 0, 0, 0, '', 0
  local place, eta, last
  for i = 0, tonumber(g.n) - 1 do
    local child = id .. '.' .. int(i)
    local c = fields(record_key(child), 'status', 'prompt_tokens', 'k', 'started_at', 'rides', 'pool', 'weight', 'lease',
      'cached_tokens')
    if c.status == 'running' then
      local _, ms = outlook_of(child, c)
      eta = ms and math.max(ms, eta or 0) or eta
    elseif c.status == 'queued' then
      -- it waits until its first child rides, and ends with its last
      place = place or (outlook_of(child, c))
      last = { child, c }
    end
    children[#children + 1] = quote(child)
    texts[#texts + 1] = quote(redis.call('GET', text_key(child)) or '')
    prompt_tokens = prompt_tokens + tonumber(c.prompt_tokens == '' and 0 or c.prompt_tokens)
    cached = cached + tonumber(c.cached_tokens == '' and 0 or c.cached_tokens)
    tokens = tokens + tonumber(c.k == '' and 0 or c.k)
    riding = math.max(riding, tonumber(c.rides == '' and 0 or c.rides))
    if c.started_at ~= '' and (started == '' or tonumber(c.started_at) < tonumber(started)) then started = c.started_at end
  end
  local status = g.status
  if last then eta = select(2, outlook_of(last[1], last[2])) end
  if status == 'queued' and started ~= '' then status, place = 'running', nil end
  return table.concat({
    '{"id":', quote(id), ',"object":"job","status":', quote(status), ',"model":', quote(g.model), ',"seed":', g.seed,
    ',"created_at":', seconds_or_null(g.created_at), ',"started_at":', seconds_or_null(started),
    ',"finished_at":', seconds_or_null(g.finished_at), ',"deadline_at":', seconds_or_null(g.deadline),
    ',"priority":', g.priority == '' and '5' or g.priority,
    ',"queue_position":', int_or_null(place), ',"eta_s":', eta_json(eta), ',"attempts":', int(riding),
    ',"cancel_requested":', g.stop == 'cancelled' and 'true' or 'false',
    ',"text":null,"texts":[', table.concat(texts, ','), '],"children":[', table.concat(children, ','),
    '],"finish_reason":', quote_or_null(g.finish_reason), ',"usage":', usage_json(int(prompt_tokens), int(tokens), int(cached)),
    ',"error":', number_or_null(g.error), ',"metadata":', number_or_null(g.metadata), ',"group":null,"webhook":null,"urls":', urls_json(id), '}'
  })
end
