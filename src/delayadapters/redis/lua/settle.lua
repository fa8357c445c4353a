-- Ends claims that were not published: given back, to be retried later, or dead.
-- keys: due leased dead entries calls calls_old released released_old released_new counts
-- args: now call fence verdicts wake
-- include: clock entries lease once released settle wake counts lateness
-- verdicts: msgpack, flat: entry, verb, pause, reason, ... verb: ack (pause: its due time, for the lateness) | back (no attempt counted) | retry (attempts + 1,
-- next try in `pause` microseconds) | dead. fence: the deadline of the claims.
-- Returns how many were still ours.
local before = answered()
if before then return before end
local list = cmsgpack.unpack(verdicts)
local at, count = clock(), 0
local _, head = head_of(due)
-- A key of another type must show itself before the first write.
redis.call('ZCARD', dead)
redis.call('HLEN', entries)
redis.call('SCARD', released)
redis.call('LLEN', released_new)
local earliest
local acked, back, failed, died, dropped = 0, 0, 0, 0, 0
for i = 1, #list, 4 do
  local entry, verb, pause, reason = list[i], list[i + 1], list[i + 2], list[i + 3]
  if verb == 'ack' then
    local held = ack_all({ entry }, tonumber(fence))
    acked, count = acked + held, count + held
    if held == 1 then note_late(at - pause, 1) end
  elseif #still_held({ entry }, tonumber(fence)) == 1 then
    count = count + 1
    redis.call('ZREM', leased, entry)
    local record = redis.call('HGET', entries, field_of(entry))
    if not record then
      dropped = dropped + 1
    else
      if verb == 'dead' or not readable(record) then
        if readable(record) then
          local state = state_of(record)
          record = with_state(record, { state[1] + 1, state[2], reason, state[4] })
          failed = failed + 1
        end
        died = died + 1
        bury(entry, record, at, reason)
      else
        local when = due_of(record)
        if verb == 'retry' then
          local state = state_of(record)
          when = math.max(when, at + pause)
          failed = failed + 1
          redis.call('HSET', entries, field_of(entry), with_state(record, { state[1] + 1, state[2], reason, state[4] }))
        end
        if verb == 'back' then back = back + 1 end
        redis.call('ZADD', due, num(when), entry)
        if not earliest or when < earliest then earliest = when end
      end
    end
  end
end
if earliest then
  if earliest <= at then redis.pcall('PUBLISH', wake, 'help') else wake_if_earlier(earliest, head) end
end
if count > 0 then
  count_up('released', acked)
  count_up('given_back', back)
  count_up('failed', failed)
  count_up('dead', died)
  count_up('dropped', dropped)
  write_late()
  answer(num(count), at)
end
return num(count)
