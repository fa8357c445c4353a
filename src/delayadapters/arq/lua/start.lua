-- Marks jobs of arq's queue as in progress: arq's WATCH, EXISTS, ZSCORE, MULTI, PSETEX, EXEC for each, in one step.
-- keys: due
-- args: queue prefix now ttl free ids...
-- prefix: of the in-progress keys. now: the worker's clock, milliseconds. ttl: of the mark, milliseconds. free: how many
-- may start. ids: in the order to start them.
-- Returns {id, score, ...} of those that are to be started: queued, due, and running nowhere.
local out, left = {}, tonumber(free)
for i = ids_at, #ARGV do
  if left < 1 then break end
  local id = ARGV[i]
  local score = redis.call('ZSCORE', queue, id)
  if score and tonumber(score) ~= 0 and tonumber(score) <= tonumber(now) and redis.call('EXISTS', prefix .. id) == 0 then
    redis.call('PSETEX', prefix .. id, ttl, '1')
    out[#out + 1] = id
    out[#out + 1] = score
    left = left - 1
  end
end
return out
