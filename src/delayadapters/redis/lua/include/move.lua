-- Giving waiting entries another due time. Needs: clock, entries; keys: due.
-- when: > 0 microseconds since the epoch, <= 0 minus a relative delay.
local function due_at_of(when, at)
  local moment = tonumber(when)
  return moment > 0 and math.max(moment, at) or at - moment
end
local function move_all(waiting, due_at)
  for _, one in ipairs(waiting) do
    redis.call('ZADD', due, num(due_at), one.entry)
    if readable(one.record) then redis.call('HSET', entries, one.field, with_due(one.record, due_at)) end
  end
end
