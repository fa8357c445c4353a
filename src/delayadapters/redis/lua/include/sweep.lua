-- Strikes off loops not heard of for a day: processes that were killed. Consumers of their own, which claim() and never
-- say that they leave, after ten minutes without a lease.
local function sweep_loops(at)
  if redis.call('HLEN', loops) < 8 then return end
  local all, gone_at = redis.call('HGETALL', loops), {}
  for i = 1, #all, 2 do
    local loop = string.gsub(all[i], '^beat:', '')
    local deadline, last, who = string.match(all[i + 1], '^%S+ (%S+) (%S+) (.*)$')
    local patience = 86400000000
    if who == 'claim()' then
      last, patience = math.max(tonumber(last), tonumber(deadline)), 600000000
    end
    gone_at[loop] = math.max(gone_at[loop] or 0, (tonumber(last or all[i + 1]) or 0) + patience)
  end
  for loop, when in pairs(gone_at) do
    if loop ~= owner and at > when then redis.call('HDEL', loops, loop, 'beat:' .. loop) end
  end
end
