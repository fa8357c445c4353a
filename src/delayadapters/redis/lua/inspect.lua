-- Looks whether entries and records belong together. Changes nothing.
-- keys: due leased dead entries
-- args: which start count
-- include: entries
-- which: due | leased | dead; start, count: ranks in it.
-- Returns {fields of `entries`, members of all three sets, members looked at, bad entry, ...}: bad when its record is
-- missing, or is that of another entry.
local key = which == 'due' and due or which == 'leased' and leased or dead
local list = redis.call('ZRANGE', key, start, start + count - 1)
local members = redis.call('ZCARD', due) + redis.call('ZCARD', leased) + redis.call('ZCARD', dead)
local out = { redis.call('HLEN', entries), members, #list }
local bytes = 0
for i = 1, #list do
  -- One by one, and no more than 1 MiB: large records read at once would stall Redis.
  if bytes >= 1048576 then
    out[3] = i - 1
    break
  end
  local record = redis.call('HGET', entries, (field_of(list[i])))
  bytes = bytes + (record and #record or 0)
  if not record or sub(record, 2, 7) ~= sub(list[i], 1, 6) then out[#out + 1] = list[i] end
end
return out
