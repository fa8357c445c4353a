-- Ending claims. Needs: entries, lease, released; key: released_new. The first write is never one that maxmemory forbids
-- (ZREM), and after it Redis lets a script finish: release and ack drain a full server.
-- Few at a time are remembered as released at once. Many, as in a drain, go into a list of the newest 10,000: that costs
-- a third of it, but is slow to search, so that whoever asks (recall.lua) moves some over.
local function note_released(ids)
  if #ids == 0 then return end
  if #ids <= 20 then return remember(ids) end
  redis.call('RPUSH', released_new, unpack(ids))
  redis.call('LTRIM', released_new, -10000, -1)
  redis.call('PEXPIRE', released_new, 3600000)
end
local function ack_all(list, fence)
  local held = still_held(list, fence)
  if #held > 0 then
    redis.call('ZREM', leased, unpack(held))
    note_released(forget(held))
  end
  return #held
end
local function bury(entry, record, at, reason)
  if readable(record) then
    local state = state_of(record)
    record = with_state(numbered(entry, record), { state[1], state[2], reason, state[4] })
  else
    record = wrapped(entry, record, at, reason)
  end
  redis.call('HSET', entries, field_of(entry), record)
  redis.call('ZADD', dead, num(at), entry)
end
