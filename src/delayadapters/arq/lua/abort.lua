-- Ends a job that no worker has started: one that waits with us, or in arq's queue.
-- keys: due leased dead entries calls calls_old counts
-- args: now call job result expires retry in_progress queue id outcome ttl
-- include: clock entries byid once counts
-- outcome: what to keep as arq's result ('' for nothing), for ttl milliseconds.
-- Returns aborted (it will not run; the result is stored) | in_flight (being released right now) | running | finished |
-- not_found.
local before = answered()
if before then return before end
if redis.call('EXISTS', result) == 1 then return 'finished' end
local waiting, leases = {}, 0
for _, one in ipairs((entries_of(id))) do
  if one.state == 'waiting' then waiting[#waiting + 1] = one.entry end
  if one.state == 'leased' then leases = leases + 1 end
end
local running = redis.call('EXISTS', in_progress) == 1
local queued = redis.call('ZSCORE', queue, id)
if #waiting == 0 and (running or not queued) then
  if running then return 'running' end
  return leases > 0 and 'in_flight' or 'not_found'
end
-- The removals first: under maxmemory they are allowed, and then everything after them.
for i = 1, #waiting do redis.call('ZREM', due, waiting[i]) end
if not running and queued then
  redis.call('ZREM', queue, id)
  -- A worker that has just seen the id in the queue watches this key: touching it stops its transaction.
  redis.call('SET', in_progress, '1')
  redis.call('DEL', in_progress)
end
forget(waiting)
count_up('cancelled', #waiting)
if running then
  -- Its retry waits with us although it runs: a second run after its in-progress key had passed. Only that is left.
  answer('running', clock())
  return 'running'
end
redis.call('DEL', job, expires, retry)
if outcome ~= '' then redis.call('SET', result, outcome, 'PX', ttl) end
-- An entry that is leased goes out once more; the result it meets then keeps it from running.
return answer(leases > 0 and outcome == '' and 'in_flight' or 'aborted', clock())
