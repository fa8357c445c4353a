-- Ends claims that were not published: given back, to be retried later, or dead.
-- keys: due leased dead entries calls calls_old released released_old released_new
-- args: now call fence verdicts wake
-- include: clock entries lease once released settle wake
-- verdicts: msgpack, flat: entry, verb, pause, reason, ... verb: ack | back (no attempt counted) | retry (attempts + 1,
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
for i = 1, #list, 4 do
  local entry, verb, pause, reason = list[i], list[i + 1], list[i + 2], list[i + 3]
  if verb == 'ack' then
    count = count + ack_all({ entry }, tonumber(fence))
  elseif #still_held({ entry }, tonumber(fence)) == 1 then
    count = count + 1
    redis.call('ZREM', leased, entry)
    local record = redis.call('HGET', entries, field_of(entry))
    if record then
      if verb == 'dead' or not readable(record) then
        if readable(record) then
          local state = state_of(record)
          record = with_state(record, { state[1] + 1, state[2], reason, state[4] })
        end
        bury(entry, record, at, reason)
      else
        local when = due_of(record)
        if verb == 'retry' then
          local state = state_of(record)
          when = math.max(when, at + pause)
          redis.call('HSET', entries, field_of(entry), with_state(record, { state[1] + 1, state[2], reason, state[4] }))
        end
        redis.call('ZADD', due, num(when), entry)
        if not earliest or when < earliest then earliest = when end
      end
    end
  end
end
if earliest then
  if earliest <= at then redis.pcall('PUBLISH', wake, 'help') else wake_if_earlier(earliest, head) end
end
if count > 0 then answer(num(count), at) end
return num(count)
