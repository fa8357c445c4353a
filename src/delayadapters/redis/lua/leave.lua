-- A loop ends or pauses: hands the watch over at once.
-- keys: watch loops
-- args: owner wake
-- Returns 1 when it held the watch.
local holder = redis.call('GET', watch)
redis.call('HDEL', loops, owner)
if holder ~= owner then return '0' end
redis.call('DEL', watch)
redis.pcall('PUBLISH', wake, 'watch')
return '1'
