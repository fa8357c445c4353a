-- Records of entries, as many from the front as fit in max_bytes (at least one); their fields (perhaps more), and whether
-- any of those is a further one's. Needs: entries.lua.
-- Reads 1, 4, then 16 at a time, and drops what it read beyond max_bytes: large payloads behind many small ones would
-- otherwise be copied all at once.
local function fetch(list, max_bytes)
  local records, fields, mixed, bytes, step = {}, {}, false, 0, 1
  while #records < #list and bytes < max_bytes do
    local from = #records
    local count = math.min(#list - from, step)
    local _, some = fields_of(list, from + 1, from + count, fields)
    mixed = mixed or some
    local got = redis.call('HMGET', entries, unpack(fields, from + 1, from + count))
    for i = 1, count do
      if bytes >= max_bytes then break end
      records[from + i] = got[i]
      if got[i] then bytes = bytes + #got[i] end
    end
    step = math.min(16, step * 4)
  end
  return records, fields, mixed
end
local function first(list, count)
  if count >= #list then return list end
  local out = {}
  for i = 1, count do out[i] = list[i] end
  return out
end
