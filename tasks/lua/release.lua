-- Hand a job back: its owner drains, or its child is long in loading. It keeps its place (oldest accept first); no charge.
-- ARGV[2..4]: id, epoch, nonce. Returns released, fenced, or the status that a wanted stop has ended it with.
local id = ARGV[2]
local j = fields(KEYS[1], 'status', 'epoch', 'owner', 'stop', 'deadline', 'pool', 'order', 'k', 'weight', 'charged')
if not owned(j, ARGV[3], ARGV[4]) then return 'fenced' end
if j.stop ~= '' then
  terminal_stop(id, j.stop)
  return j.stop
end
redis.call('HSET', KEYS[1], 'status', 'queued', 'owner', '', 'lease', '0', 'boarded', '')
note_event(KEYS[1], 'handed_back', j.k, '')
Q.join(id, j.pool, j.weight ~= '' and j.weight or Q.weight_of_record(id), j.order, redis.call('PEXPIRETIME', KEYS[1]))
Q.refund(j.pool, id, j.weight, j.charged)
set_due(id, due_in_queue(j.k, tonumber(j.deadline)), redis.call('PEXPIRETIME', KEYS[1]))
return 'released'
