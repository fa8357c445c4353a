-- The commands of a direct release in a record: reading them, and filling in what they leave open. Needs: clock, entries.
local UNLESS_EXISTS = 4
-- As Python's isoformat(): "2026-11-29T19:43:41+00:00", with six digits of a second unless they are all 0.
local function iso(at)
  local floor = math.floor
  local seconds = floor(at / 1000000)
  local days, fraction = floor(seconds / 86400), at - seconds * 1000000
  local of_day = seconds - days * 86400
  -- Years beginning in March, in eras of 400 years, so that a leap day is the last of its year.
  local z = days + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d', yoe + era * 400 + (month <= 2 and 1 or 0), month,
    doy - floor((153 * mp + 2) / 5) + 1, floor(of_day / 3600), floor(of_day / 60) % 60, of_day % 60)
    .. (fraction > 0 and string.format('.%06d', fraction) or '') .. '+00:00'
end
local FILL = {
  [0] = function(job) return job.payload end,
  [1] = function(job) return num(math.floor(job.due / 1000)) end,
  [2] = function(job) return num(math.floor(job.at / 1000)) end,
  [3] = function(job)
    job.salt = (job.salt or 0) + 1
    return string.sub(redis.sha1hex(job.entry .. num(job.at) .. ':' .. job.salt), 1, 32)
  end,
  [5] = function(job) return id_of(job.entry) end,
  [6] = function(job) return iso(job.due) end,
}
local function fill(word, job)
  if type(word) == 'number' then return FILL[word](job) end
  if type(word) ~= 'table' then return word end
  local parts = {}
  for i = 1, #word do parts[i] = fill(word[i], job) end
  return table.concat(parts)
end
-- Mostly all jobs of a queue have the same commands.
local last_packed, last_commands
local function unpacked(packed)
  if packed ~= last_packed then last_packed, last_commands = packed, cmsgpack.unpack(packed) end
  return last_commands
end
-- The commands still to run, filled in. A guard passed before is asked again while nothing behind it has run. Raises for a section that is not one of commands.
local function read_job(entry, record, at)
  local state, after = state_of(record)
  local _, packed
  if flag(record, META) then _, after = struct.unpack('>I4c0', record, after) end
  packed, after = struct.unpack('>I4c0', record, after)
  local commands = unpacked(packed)
  local job = {
    entry = entry, record = record, at = at, due = due_of(record), state = state,
    count = #commands, todo = {}, payload = string.sub(record, after),
  }
  while state[4] > 0 and commands[state[4]] and commands[state[4]][1] == UNLESS_EXISTS do state[4] = state[4] - 1 end
  for k = state[4] + 1, #commands do
    local words = {}
    for i, word in ipairs(commands[k]) do
      words[i] = i == 1 and word == UNLESS_EXISTS and word or fill(word, job)
    end
    job.todo[#job.todo + 1] = words
  end
  return job
end
-- Mostly a record is one push of its payload to a list, and those before and after it have the same: read once a run.
-- Of the last push read: its record's flags and sections, where the payload begins, and the command.
local push_bits, push_sections, push_payload_at, last_push
-- The payload, when this record is the same push as the last one read.
local function same_push(record)
  if push_bits and byte(record, 1) == push_bits and find(record, push_sections, 15, true) == 15 then
    return sub(record, push_payload_at)
  end
end
-- {verb, key, ...} and the payload; nil when it is other commands, or begun. Raises for a section not of commands.
local function read_push(record)
  push_bits = nil
  local bits = byte(record, 1)
  if bits % 2 == 1 then return nil end
  local after, packed = 15
  if flag(record, META) then after = after + 4 + struct.unpack('>I4', record, after) end
  packed, after = struct.unpack('>I4c0', record, after)
  local commands = unpacked(packed)
  local only = #commands == 1 and commands[1]
  if not only or #only ~= 3 or (only[1] ~= 'LPUSH' and only[1] ~= 'RPUSH') then return nil end
  if type(only[2]) ~= 'string' or only[3] ~= 0 then return nil end
  push_bits, push_sections, push_payload_at, last_push = bits, sub(record, 15, after - 1), after, only
  return only, sub(record, after)
end
