-- Gives every waiting entry of an id a new due time.
-- keys: due leased dead entries calls calls_old released released_old released_new counts
-- args: now call id when wake
-- include: clock entries byid once released recall wake counts move
-- when: as in move.lua.
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
local at = clock()
local due_at = due_at_of(when, at)
local _, head = head_of(due)
move_all(waiting, due_at)
count_up('rescheduled', #waiting)
wake_if_earlier(due_at, head)
return answer(leases > 0 and 'in_flight' or 'rescheduled', at)
