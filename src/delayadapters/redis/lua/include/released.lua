-- Which ids were released recently, so that cancel can tell RELEASED from NOT_FOUND. Keys: released released_old.
-- Two generations of 10,000; gone an hour after the last release.
local function remember(ids)
  redis.call('SADD', released, unpack(ids))
  local size = redis.call('SCARD', released)
  redis.call('PEXPIRE', released, 3600000)
  if size > 10000 then
    redis.call('UNLINK', released_old)
    redis.call('RENAME', released, released_old)
  end
end
