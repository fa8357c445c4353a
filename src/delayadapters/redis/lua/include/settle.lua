-- Ending claims. Needs: entries, lease, released. The first write is never one that maxmemory forbids (ZREM), and after
-- it Redis lets a script finish: release and ack drain a full server.
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
