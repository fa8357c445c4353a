-- Waking the loops. Needs: clock.lua; keys: due; args: wake (a channel). A user without the right to PUBLISH loses the
-- message only, which costs at most the safety poll.
local function head_of(key)
  local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return head[1], head[2] and tonumber(head[2])
end
-- Says the new head's time when `at` is earlier than the head was.
local function wake_if_earlier(at, before)
  if not before or at < before then redis.pcall('PUBLISH', wake, 'due ' .. num(at)) end
end
