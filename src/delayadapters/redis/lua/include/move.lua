-- Giving waiting entries another due time. Needs: clock, entries; keys: due.
-- when: > 0 microseconds since the epoch, <= 0 minus a relative delay.
local function due_at_of(when, at)
  local moment = tonumber(when)
  return moment > 0 and math.max(moment, at) or at - moment
end
-- By the hundreds, since a call for each entry is most of the time this takes.
local function move_all(waiting, due_at)
  local score = num(due_at)
  for from = 1, #waiting, 500 do
    local members, fields = {}, {}
    for i = from, math.min(from + 499, #waiting) do
      local one = waiting[i]
      members[#members + 1] = score
      members[#members + 1] = one.entry
      if readable(one.record) then
        fields[#fields + 1] = one.field
        fields[#fields + 1] = with_due(one.record, due_at)
      end
    end
    redis.call('ZADD', due, unpack(members))
    if #fields > 0 then redis.call('HSET', entries, unpack(fields)) end
  end
end
