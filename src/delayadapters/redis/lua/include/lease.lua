-- Leases. Needs: clock.lua; keys: leased. The deadline is the fence, so no two claims may share one.
-- Whether the loop has sent a later request than this one. Needs args: call.
local function overtaken(last_call) return last_call ~= nil and tonumber(call) < tonumber(last_call) end
local function new_deadline(at, length)
  local deadline = at + length
  while redis.call('ZCOUNT', leased, num(deadline), num(deadline)) > 0 do deadline = deadline + 1 end
  return deadline
end
local function lease_all(list, deadline)
  local pairs_, score = {}, num(deadline)
  for i = 1, #list do
    pairs_[2 * i - 1] = score
    pairs_[2 * i] = list[i]
  end
  redis.call('ZADD', leased, unpack(pairs_))
end
-- Of `list`, those still leased until exactly `fence`.
local function still_held(list, fence)
  local scores, held, written = redis.call('ZMSCORE', leased, unpack(list)), {}, num(fence)
  for i = 1, #list do
    local score = scores[i]
    if score and (score == written or tonumber(score) == fence) then held[#held + 1] = list[i] end
  end
  return held
end
