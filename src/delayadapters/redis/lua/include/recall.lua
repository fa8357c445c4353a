-- Whether an id was released recently. Needs: released.lua; keys: released released_old released_new.
-- Searching a list of 10,000 takes Redis about 0.1 ms; after 40 questions it is empty, and a question is cheap again.
local function was_released(id)
  local known = redis.call('SISMEMBER', released, id) == 1 or redis.call('SISMEMBER', released_old, id) == 1
  if redis.call('LLEN', released_new) > 0 then
    known = known or redis.call('LPOS', released_new, id) ~= false
    -- Removing first makes the script one that has written, which maxmemory then lets finish.
    remember(redis.call('LPOP', released_new, 250))
  end
  return known
end
local function unremember(id)
  redis.call('SREM', released, id)
  redis.call('SREM', released_old, id)
  redis.call('LREM', released_new, 0, id)
end
