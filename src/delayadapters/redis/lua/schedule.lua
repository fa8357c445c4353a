-- Stores jobs. All or none of a call are stored.
-- keys: due leased dead entries seq calls calls_old counts
-- args: now call mode distinct unless expect alongside touch wake jobs
-- include: clock entries byid once distinct wake counts
-- mode: error|keep|replace|add, what to do with an id that already has a live entry.
-- jobs: msgpack, flat: id, when, flags, tail, ... where `when` > 0 is microseconds since the epoch and <= 0 is minus a
-- relative delay; flags and tail are the record less its number and due time.
-- distinct: '1' with mode add: not when a live entry has the same flags and tail (answered as kept); '0': no. Any other
-- word is a field of the meta: not when a live entry has the same there.
-- unless: msgpack list of keys; when one exists, every job is answered as 'exists' ('' for none).
-- expect: msgpack list of {command, reply}; when one answers anything else ('' for nil), every job is answered as 'exists'.
-- alongside: msgpack list of commands to run in the same step, before anything is stored ('' for none).
-- touch: '1' when a WAIT follows: then something is written in any case.
-- Returns msgpack {now, seq of the first job, special}, special listing what is not plainly scheduled:
-- {index, 'exists'} (then nothing was stored) | {index, 'split'} (the same: ask for those up to it, and for the rest) |
-- {index, 'kept', state, score, record} | {index, 'same', index of the one kept} | {index, 'replaced' | 'in_flight'}.
local list = cmsgpack.unpack(jobs)
local count = #list / 4
local before = answered()
if before then
  -- The records of kept jobs are not remembered with the answer, but read again.
  local reply = cmsgpack.unpack(before)
  for _, row in ipairs(reply[3]) do
    if row[2] == 'kept' then row[5] = redis.call('HGET', entries, row[5]) or '' end
  end
  return cmsgpack.pack(reply)
end
local at = clock()
local ids, names = {}, {}
for i = 1, count do
  ids[i] = list[4 * i - 3]
  names[2 * i - 1] = ids[i]
  names[2 * i] = '\255' .. ids[i]
end
-- An id whose own field is free can still have further entries: those outlive the first one.
-- What is there is read whole, so large payloads end the call early: it is asked again, in parts.
local taken, read, bytes, step = {}, 0, 0, 1
while read < count do
  local upto = math.min(count, read + step)
  for k, record in ipairs(redis.call('HMGET', entries, unpack(names, 2 * read + 1, 2 * upto))) do
    taken[2 * read + k], bytes = record, bytes + (record and #record or 0)
  end
  read, step = upto, math.min(32, 4 * step)
  if bytes > 2097152 and read < count and alongside == '' then
    return cmsgpack.pack({ at, 0, { { read, 'split' } } })
  end
end
local none = {}
local special, seen, exists, live, skip, free = {}, {}, {}, {}, {}, {}
local function refused()
  for i = 1, count do exists[i] = { i, 'exists' } end
  return cmsgpack.pack({ at, 0, exists })
end
if unless ~= '' then
  for _, key in ipairs(cmsgpack.unpack(unless)) do
    if redis.call('EXISTS', key) == 1 then return refused() end
  end
end
if expect ~= '' then
  for _, pair in ipairs(cmsgpack.unpack(expect)) do
    local reply = redis.pcall(unpack(pair[1]))
    if type(reply) == 'table' and reply.err then return reply end
    if tostring(reply or '') ~= pair[2] then return refused() end
  end
end
for i = 1, count do
  local id = ids[i]
  live[i], free[i] = none, true
  local first_of_id = seen[id]
  if first_of_id then
    live[i], free[i] = live[first_of_id], free[first_of_id]
  elseif mode == 'add' and distinct == '0' then
    -- Not entries_of: an id may have thousands of entries, and each addition would look at all of them.
    free[i] = field_free(id, taken[2 * i - 1])
  elseif taken[2 * i - 1] or taken[2 * i] then
    local found
    found, free[i] = entries_of(id)
    live[i] = {}
    for _, one in ipairs(found) do
      if one.state ~= 'dead' then table.insert(live[i], one) end
    end
  end
  if mode == 'error' and (#live[i] > 0 or seen[id]) then exists[#exists + 1] = { i, 'exists' } end
  if mode == 'keep' then
    if seen[id] then
      special[#special + 1] = { i, 'same', seen[id] }
      skip[i] = true
    elseif #live[i] > 0 then
      local one = live[i][1]
      for _, other in ipairs(live[i]) do
        if one.state ~= 'waiting' and other.state == 'waiting' then one = other end
      end
      special[#special + 1] = { i, 'kept', one.state, one.score, one.field, one.record }
      skip[i] = true
    end
  end
  if distinct ~= '0' then
    local same = distinct == '1' and same_tail or same_field
    for _, one in ipairs(live[i]) do
      if not skip[i] and same(one.record, list[4 * i - 1], list[4 * i]) then
        special[#special + 1] = { i, 'kept', one.state, one.score, one.field, one.record }
        skip[i] = true
      end
    end
  end
  seen[id] = seen[id] or i
end
if #exists > 0 then return cmsgpack.pack({ at, 0, exists }) end

local _, head = head_of(due)
local first = redis.call('INCRBY', seq, count) - count + 1
if alongside ~= '' then
  for _, words in ipairs(cmsgpack.unpack(alongside)) do
    local reply = redis.pcall(unpack(words))
    if type(reply) == 'table' and reply.err then return reply end
  end
end
local earliest
local stored_jobs, made_way = 0, 0
local scores, fields, numbers_of = {}, {}, {}
-- ZADD before HSET, and undone when HSET is refused (ACL): nothing is half-written.
local function store()
  if #scores == 0 then return end
  redis.call('ZADD', due, unpack(scores))
  local stored = redis.pcall('HSET', entries, unpack(fields))
  if type(stored) == 'table' and stored.err then
    for i = 2, #scores, 2 do redis.call('ZREM', due, scores[i]) end
    return stored
  end
  for id, packed in pairs(numbers_of) do
    local key = '\255' .. id
    redis.call('HSET', entries, key, (redis.call('HGET', entries, key) or '') .. table.concat(packed))
  end
  scores, fields, numbers_of = {}, {}, {}
end
local last = {}
for i = 1, count do
  if not skip[i] then
    local id, when, flags, tail = list[4 * i - 3], list[4 * i - 2], list[4 * i - 1], list[4 * i]
    local due_at = when > 0 and math.max(when, at) or at - when
    local number = 2 * (first + i - 1)
    local again = last[id]
    if mode == 'replace' then
      local outcome = again and 'replaced'
      if again then
        local err = store()
        if err then return err end
        redis.call('ZREM', due, again)
        forget({ again })
        made_way = made_way + 1
      else
        for _, old in ipairs(live[i]) do
          if old.state == 'leased' then
            redis.call('ZREM', leased, old.entry)
            outcome = 'in_flight'
          else
            redis.call('ZREM', due, old.entry)
            outcome = outcome or 'replaced'
          end
          forget({ old.entry })
          made_way = made_way + 1
          if old.field == id then free[i] = true end
        end
      end
      if again and not further(again) then free[i] = true end
      if outcome then special[#special + 1] = { i, outcome } end
    elseif again then
      free[i] = false
    end
    if not free[i] then number = number + 1 end
    local packed = struct.pack('>I6', number)
    local entry = packed .. id
    scores[#scores + 1] = num(due_at)
    scores[#scores + 1] = entry
    fields[#fields + 1] = field_of(entry)
    fields[#fields + 1] = string.char(flags) .. packed .. struct.pack('>I7', due_at) .. tail
    last[id] = entry
    stored_jobs = stored_jobs + 1
    if not free[i] then
      local those = numbers_of[id] or {}
      numbers_of[id] = those
      those[#those + 1] = packed
    end
    if not earliest or due_at < earliest then earliest = due_at end
  end
end
local err = store()
if err then return err end
count_up('scheduled', stored_jobs)
count_up('replaced', made_way)
local records = {}
for k, row in ipairs(special) do records[k] = table.remove(row, 6) or false end
if earliest or alongside ~= '' then
  answer(cmsgpack.pack({ at, first, special }), at)
  if earliest then wake_if_earlier(earliest, head) end
elseif touch == '1' then
  redis.pcall('INCRBY', seq, 0)
end
for k, row in ipairs(special) do row[5] = records[k] or row[5] end
return cmsgpack.pack({ at, first, special })
