-- Whether a record is of the same job as one about to be stored: in all, or in one field of the meta. Needs: entries.lua;
-- args: distinct (the field).
local function same_tail(record, flags, tail)
  if not readable(record) then return false end
  local _, after = state_of(record)
  local bits = string.byte(record, 1)
  if flag(record, STATE) then bits = bits - STATE end
  return bits == flags and string.sub(record, after) == tail
end
local function meta_of(flags, text, after)
  if math.floor(flags / META) % 2 == 0 then return nil end
  local ok, meta = pcall(function() return cmsgpack.unpack((struct.unpack('>I4c0', text, after))) end)
  return ok and type(meta) == 'table' and meta[distinct] or nil
end
local function same_field(record, flags, tail)
  local wanted = meta_of(flags, tail, 1)
  if not wanted or not readable(record) then return false end
  local _, after = state_of(record)
  return meta_of(string.byte(record, 1), record, after) == wanted
end
