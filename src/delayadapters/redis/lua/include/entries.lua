-- Entries and their records. Needs keys: entries.
-- An entry is <6-byte number><id>; the number's lowest bit says in which field of `entries` its record is:
--   0: the field <id>;  1: the field <0xFE><entry>, used while <id> is taken by another entry of the same id.
-- <0xFF><id> then holds the numbers of those further entries. Ids are UTF-8, so they never begin with 0xFE or 0xFF.
-- Record: flags(1) number(6) due(7), then, as flagged, sections of <4-byte length><bytes>: state, meta, commands; then
-- the payload. state is msgpack {attempts, requeues, reason, commands done}.
local STATE, META, DIRECT, RAW, VERSION = 1, 2, 4, 8, 16
-- What runs once a job and script is worth a local: a claim's time is a hundred times that of these few lines.
local byte, sub, find, unpack_struct = string.byte, string.sub, string.find, struct.unpack

local function further(entry) return (byte(entry, 6) or 0) % 2 == 1 end
local function id_of(entry) return sub(entry, 7) end
local function field_of(entry)
  if (byte(entry, 6) or 0) % 2 == 1 then return '\254' .. entry end
  return sub(entry, 7)
end
-- Their fields from the `from`-th on, put into `out`; and whether any is a further one's.
local function fields_of(list, from, upto, out)
  local mixed = false
  out = out or {}
  for i = from or 1, upto or #list do
    local entry = list[i]
    if (byte(entry, 6) or 0) % 2 == 1 then
      out[i], mixed = '\254' .. entry, true
    else
      out[i] = sub(entry, 7)
    end
  end
  return out, mixed
end
local function flag(record, bit) return byte(record, 1) % (2 * bit) >= bit end
local function due_of(record) return (unpack_struct('>I7', record, 8)) end
local function with_due(record, due)
  return string.sub(record, 1, 7) .. struct.pack('>I7', due) .. string.sub(record, 15)
end
local function state_of(record)
  if not flag(record, STATE) then return { 0, 0, '', 0 }, 15 end
  local packed, after = struct.unpack('>I4c0', record, 15)
  return cmsgpack.unpack(packed), after
end
-- Whether the functions here can work with a record: none of them raises for one that passes. If so, its flags.
local function readable(record)
  local bits = #record >= 14 and byte(record, 1) or 0
  if bits < VERSION or bits >= 2 * VERSION then return false end
  if bits % 2 == 0 then return bits end
  local ok, state = pcall(state_of, record)
  return ok and type(state) == 'table' and type(state[1]) == 'number' and type(state[2]) == 'number'
    and type(state[3]) == 'string' and type(state[4]) == 'number' and bits
end
local function with_state(record, state)
  local _, after = state_of(record)
  local bits = string.byte(record, 1)
  if not flag(record, STATE) then bits = bits + STATE end
  local packed = cmsgpack.pack(state)
  return string.char(bits) .. string.sub(record, 2, 14) .. struct.pack('>I4', #packed) .. packed .. string.sub(record, after)
end
-- The record of this entry, whatever entry it says it is of: by its number it is found.
local function numbered(entry, record)
  return string.sub(record, 1, 1) .. string.sub(entry .. '\0\0\0\0\0\0', 1, 6) .. string.sub(record, 8)
end
-- A record we cannot read, kept whole as the payload of one we can.
local function wrapped(entry, record, at, reason)
  return with_state(string.char(VERSION + RAW) .. string.sub(entry .. '\0\0\0\0\0\0', 1, 6) .. struct.pack('>I7', at) .. record, { 0, 0, reason, 0 })
end
-- Forgets the records in these fields, whose entries have left every zset; answers their ids. mixed: as fields_of says.
local function forget_fields(fields, mixed)
  -- unpack overflows past about 7,000 arguments, and an id may have more entries than that.
  for from = 1, #fields, 1000 do
    redis.call('HDEL', entries, unpack(fields, from, math.min(from + 999, #fields)))
  end
  if not mixed then return fields end
  local ids, gone = {}, {}
  for i = 1, #fields do
    local field = fields[i]
    ids[i] = field
    if byte(field, 1) == 254 then
      local id = sub(field, 8)
      local key = '\255' .. id
      ids[i] = id
      gone[key] = gone[key] or {}
      gone[key][sub(field, 2, 7)] = true
    end
  end
  for key, those in pairs(gone) do
    local numbers, left = redis.call('HGET', entries, key) or '', {}
    for at = 1, #numbers, 6 do
      local number = string.sub(numbers, at, at + 5)
      if not those[number] then left[#left + 1] = number end
    end
    if #left == 0 then redis.call('HDEL', entries, key) else redis.call('HSET', entries, key, table.concat(left)) end
  end
  return ids
end
local function forget(list) return forget_fields(fields_of(list)) end
