-- Cancels every waiting entry of an id.
-- keys: due leased dead entries calls calls_old released released_old released_new counts
-- args: now call id
-- include: clock entries byid once released recall counts
-- Returns cancelled (final: the job will not be released) | in_flight (an entry is leased, and stays so) | released |
-- not_found.
local before = answered()
if before then return before end
local cancelled, leases = {}, 0
for _, one in ipairs((entries_of(id))) do
  if one.state == 'waiting' then cancelled[#cancelled + 1] = one.entry end
  if one.state == 'leased' then leases = leases + 1 end
end
if #cancelled == 0 then
  if leases > 0 then return 'in_flight' end
  return was_released(id) and 'released' or 'not_found'
end
local was = was_released(id)
for from = 1, #cancelled, 1000 do
  redis.call('ZREM', due, unpack(cancelled, from, math.min(from + 999, #cancelled)))
end
forget(cancelled)
if was then unremember(id) end
count_up('cancelled', #cancelled)
local outcome = leases > 0 and 'in_flight' or 'cancelled'
-- Under maxmemory a cancel must still work: the first write above is allowed, and then every further one is.
answer(outcome, clock())
return outcome
