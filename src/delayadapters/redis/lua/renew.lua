-- Extends the leases of a batch, those that are still held.
-- keys: leased loops
-- args: now owner call about length fence held...
-- include: clock lease
-- Returns {new deadline, entry, ...}: the entries still ours.
local at = clock()
local mine = redis.call('HGET', loops, owner)
local last_call, last_deadline = string.match(mine or '', '^(%S+) (%S+)')
if overtaken(last_call) then return { fence } end
local list = {}
for i = held_at, #ARGV do list[#list + 1] = ARGV[i] end
local deadline = tonumber(fence)
if last_call == call then deadline = tonumber(last_deadline) end
local still = still_held(list, deadline)
if last_call ~= call and #still > 0 then
  -- Removing first makes the script one that has written, which maxmemory then lets finish.
  redis.call('ZREM', leased, unpack(still))
  deadline = new_deadline(at, tonumber(length))
  lease_all(still, deadline)
  redis.call('HSET', loops, owner, call .. ' ' .. num(deadline) .. ' ' .. num(at) .. ' ' .. about)
end
return { num(deadline), unpack(still) }
