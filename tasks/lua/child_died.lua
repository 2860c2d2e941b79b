-- The Model worker process died under its riders: one atomic call, after the parent has sent what it still held.
-- ARGV[2]: generation of the dead process, ARGV[3]: cause, ARGV[4]: number of riders; then id, epoch, nonce a rider.
-- A rider whose died_gen is this generation, or a later one of this owner, was dealt with before: a call that comes twice,
-- or so late that the next process has died meanwhile, changes nothing. Generations are `<incarnation>.<number>`.
-- Returns, per rider, {verdict, strikes, struck_at}: back (may board again), ended, fenced.
local generation, cause = tonumber(string.match(ARGV[2], '%d+$')), ARGV[3]
local riders, results, some_young = {}, {}, false
for i = 1, tonumber(ARGV[4]) do
  local a = 5 + (i - 1) * 3
  local id = ARGV[a]
  local j = fields(KEYS[i], 'status', 'epoch', 'owner', 'k', 'boarded', 'strikes', 'struck_at', 'died_gen',
    'causes', 'pool')
  if not owned(j, ARGV[a + 1], ARGV[a + 2]) then
    local ended = j.owner == ARGV[a + 2] and j.status ~= 'running' and j.status ~= 'queued'
    results[i] = { ended and 'ended' or 'fenced', '0', '-1' }
  elseif j.died_gen ~= '' and generation <= tonumber(j.died_gen) then
    results[i] = { 'back', j.strikes, j.struck_at }
  else
    j.id, j.i, j.key = id, i, KEYS[i]
    j.young = is_young(j)
    some_young = some_young or j.young
    riders[#riders + 1] = j
  end
end
for _, j in ipairs(riders) do
  local charged = j.young or (not some_young and j.boarded ~= '')
  redis.call('HSET', j.key, 'died_gen', int(generation))
  if j.boarded ~= '' then note_event(j.key, 'died', j.k, cause) end
  local ended = false
  if charged then
    ended = charge(j.id, cause)
  elseif j.boarded ~= '' then
    redis.call('HSET', j.key, 'strikes', '1', 'struck_at', j.k, 'causes', with_cause(j.causes, j.k, cause))
  end
  redis.call('HSET', j.key, 'boarded', '')
  if not ended and j.boarded ~= '' then note('r model_process_died ' .. j.pool) end
  local now = fields(j.key, 'strikes', 'struck_at')
  results[j.i] = { ended and 'ended' or 'back', now.strikes, now.struck_at }
end
return results
