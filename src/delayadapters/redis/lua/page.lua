-- A page of the waiting or dead jobs, in order.
-- keys: due dead entries
-- args: which limit max_bytes after_score after_entry before
-- include: entries fetch
-- after_score/after_entry: where the last page ended ('' for the first). before: scores below it only ('' for all).
-- Returns {more, entry, score, record, ...}; a page ends early when its records pass max_bytes.
local key = which == 'dead' and dead or due
local start = 0
if after_score ~= '' then
  start = redis.call('ZCOUNT', key, '-inf', '(' .. after_score)
  local low, high = start, start + redis.call('ZCOUNT', key, after_score, after_score)
  -- Equal scores are ordered by entry: the first one behind after_entry, which may itself be gone.
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', key, middle, middle)[1] <= after_entry then low = middle + 1 else high = middle end
  end
  start = low
end
local stop = redis.call('ZCARD', key)
if before ~= '' then stop = math.min(stop, redis.call('ZCOUNT', key, '-inf', '(' .. before)) end
local out, last = { '0' }, math.min(stop, start + tonumber(limit)) - 1
if last >= start then
  local rows = redis.call('ZRANGE', key, start, last, 'WITHSCORES')
  local list = {}
  for i = 1, #rows, 2 do list[#list + 1] = rows[i] end
  local records = fetch(list, tonumber(max_bytes))
  for i = 1, #records do
    out[#out + 1] = list[i]
    out[#out + 1] = string.format('%.0f', tonumber(rows[2 * i]))
    out[#out + 1] = records[i] or ''
  end
  last = start + #records - 1
end
if last + 1 < stop then out[1] = '1' end
return out
