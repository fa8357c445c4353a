-- What becomes of dead entries. Needs: clock, entries; keys: due dead.
local function revive_all(list, verb, at)
  for _, one in ipairs(list) do
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
