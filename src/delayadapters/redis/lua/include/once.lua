-- A call that changed something answers the same when it is repeated under the same token (redis-py retries by itself).
-- Needs: clock.lua; keys: calls calls_old; args: call. Two generations: remembered for at least 5 minutes, or 30 s
-- when there are more than 100,000 such calls in that time.
local function answered()
  local reply = redis.call('HGET', calls, call)
  if reply then
    -- A repeated call writes, too: WAIT after it counts the replicas that have this connection's last write.
    redis.call('PEXPIRE', calls, 660000)
    return reply
  end
  reply = redis.call('HGET', calls_old, call)
  if reply then redis.call('PEXPIRE', calls_old, 660000) end
  return reply
end
local function answer(reply, at)
  local since = redis.call('HGET', calls, '')
  local age = at - tonumber(since or at)
  if age > 300000000 or (age > 30000000 and redis.call('HLEN', calls) > 100000) then
    redis.call('UNLINK', calls_old)
    redis.call('RENAME', calls, calls_old)
    since = false
  end
  if since then
    redis.call('HSET', calls, call, reply)
  else
    redis.call('HSET', calls, call, reply, '', num(at))
    redis.call('PEXPIRE', calls, 660000)
  end
  return reply
end
