-- Finding an id's entries. Needs: entries.lua; keys: due leased dead.
-- A record whose entry is in no zset (keys edited by hand) is not an entry; its field counts as free.
local function state_and_score(entry)
  local state, score = 'waiting', redis.call('ZSCORE', due, entry)
  if not score then state, score = 'leased', redis.call('ZSCORE', leased, entry) end
  if not score then state, score = 'dead', redis.call('ZSCORE', dead, entry) end
  return state, score
end
-- Whether the field <id>, which holds `record`, is free.
local function field_free(id, record)
  if not record or #record < 7 then return true end
  local entry = string.sub(record, 2, 7) .. id
  local _, score = state_and_score(entry)
  return not score or field_of(entry) ~= id
end
-- A list of {entry=, field=, record=, state='waiting'|'leased'|'dead', score=}, and whether the field <id> is free.
local function entries_of(id)
  local found, free = {}, true
  local have = redis.call('HMGET', entries, id, '\255' .. id)
  local numbers = {}
  if have[1] and #have[1] >= 7 then numbers[1] = string.sub(have[1], 2, 7) end
  if have[2] then
    for at = 1, #have[2], 6 do numbers[#numbers + 1] = string.sub(have[2], at, at + 5) end
  end
  for i = 1, #numbers do
    local entry = numbers[i] .. id
    local field = field_of(entry)
    local state, score = state_and_score(entry)
    if score then
      if field == id then free = false end
      local record = have[1]
      if field ~= id then record = redis.call('HGET', entries, field) end
      if record then
        found[#found + 1] = { entry = entry, field = field, record = record, state = state, score = tonumber(score) }
      end
    end
  end
  table.sort(found, function(a, b)
    if a.score ~= b.score then return a.score < b.score end
    return a.entry < b.entry
  end)
  return found, free
end
