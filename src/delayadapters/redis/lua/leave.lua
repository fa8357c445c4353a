-- A loop ends or pauses: hands the watch over at once.
-- keys: watch loops calls
-- args: now owner wake ends
-- include: clock
-- ends: '1' to strike it off the list too; '0': it pauses, and lives.
-- Returns 1 when it held the watch.
local holder = redis.call('GET', watch)
if ends == '1' then
  redis.call('HDEL', loops, owner, 'beat:' .. owner)
  -- A claim of it that a slow network brings after this would lease to nobody: claim.lua looks here.
  redis.pcall('HSET', calls, 'left:' .. owner, '')
  redis.pcall('PEXPIRE', calls, 660000)
else
  redis.pcall('HSET', loops, 'beat:' .. owner, num(clock()))
end
if holder ~= owner then return '0' end
redis.call('DEL', watch)
redis.pcall('PUBLISH', wake, 'watch')
return '1'
