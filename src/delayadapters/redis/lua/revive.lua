-- Replays (due now, attempts from zero) or discards every dead entry of an id.
-- keys: due leased dead entries calls calls_old counts
-- args: now call id verb wake
-- include: clock entries byid once wake counts revive
-- verb: replay | discard. Returns replayed | discarded | not_found.
local before = answered()
if before then return before end
local at = clock()
local _, head = head_of(due)
local list = {}
for _, one in ipairs((entries_of(id))) do
  if one.state == 'dead' then list[#list + 1] = one end
end
local count = #list
if count == 0 then return 'not_found' end
revive_all(list, verb, at)
count_up(verb == 'discard' and 'discarded' or 'replayed', count)
if verb == 'discard' then return answer('discarded', at) end
wake_if_earlier(at, head)
return answer('replayed', at)
