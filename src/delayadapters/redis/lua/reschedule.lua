-- Gives every waiting entry of an id a new due time.
-- keys: due leased dead entries calls calls_old released released_old released_new counts
-- args: now call id when wake
-- include: clock entries byid once released recall wake counts
-- when: > 0 microseconds since the epoch, <= 0 minus a relative delay.
-- Returns rescheduled | in_flight | released | not_found.
local before = answered()
if before then return before end
local waiting, leases = {}, 0
for _, one in ipairs((entries_of(id))) do
  if one.state == 'waiting' then waiting[#waiting + 1] = one end
  if one.state == 'leased' then leases = leases + 1 end
end
if #waiting == 0 then
  if leases > 0 then return 'in_flight' end
  return was_released(id) and 'released' or 'not_found'
end
local at, moment = clock(), tonumber(when)
local due_at = moment > 0 and math.max(moment, at) or at - moment
local _, head = head_of(due)
for _, one in ipairs(waiting) do
  redis.call('ZADD', due, num(due_at), one.entry)
  if readable(one.record) then redis.call('HSET', entries, one.field, with_due(one.record, due_at)) end
end
count_up('rescheduled', #waiting)
wake_if_earlier(due_at, head)
return answer(leases > 0 and 'in_flight' or 'rescheduled', at)
