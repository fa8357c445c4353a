-- Records of entries, as many from the front as fit in max_bytes (at least one). Needs: entries.lua.
-- Reads 1, 4, 16, ... at a time, so that a run of large payloads is noticed before it is copied.
local function fetch(list, max_bytes)
  local records, bytes, step, largest = {}, 0, 1, 1
  while #records < #list and bytes < max_bytes do
    local from = #records
    local count = math.min(#list - from, step, math.max(1, math.floor((max_bytes - bytes) / largest)))
    local names = {}
    for i = 1, count do names[i] = field_of(list[from + i]) end
    local got = redis.call('HMGET', entries, unpack(names))
    for i = 1, count do
      records[from + i] = got[i]
      if got[i] then
        bytes = bytes + #got[i]
        if #got[i] > largest then largest = #got[i] end
      end
    end
    step = step * 4
  end
  return records
end
local function first(list, count)
  if count >= #list then return list end
  local out = {}
  for i = 1, count do out[i] = list[i] end
  return out
end
