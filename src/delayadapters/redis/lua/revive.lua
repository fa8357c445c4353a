-- Replays (due now, attempts from zero) or discards every dead entry of an id.
-- keys: due leased dead entries calls calls_old counts
-- args: now call id verb wake
-- include: clock entries byid once wake counts
-- verb: replay | discard. Returns replayed | discarded | not_found.
local before = answered()
if before then return before end
local at = clock()
local _, head = head_of(due)
local count = 0
for _, one in ipairs((entries_of(id))) do
  if one.state == 'dead' then
    count = count + 1
    redis.call('ZREM', dead, one.entry)
    if verb == 'discard' then
      forget({ one.entry })
    else
      local record = one.record
      if readable(record) and flag(record, RAW) then
        local _, after = state_of(record)
        record = string.sub(record, after)
      elseif readable(record) then
        local state = state_of(record)
        record = with_due(with_state(record, { 0, state[2], '', state[4] }), at)
      end
      redis.call('HSET', entries, one.field, record)
      redis.call('ZADD', due, num(at), one.entry)
    end
  end
end
if count == 0 then return 'not_found' end
count_up(verb == 'discard' and 'discarded' or 'replayed', count)
if verb == 'discard' then return answer('discarded', at) end
wake_if_earlier(at, head)
return answer('replayed', at)
