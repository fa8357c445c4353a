-- The server's clock in microseconds. `now` is an argument of every script: empty, except where a test injects a time.
-- num() writes a number without loss: Lua's own tostring keeps 14 digits.
local function clock()
  if now ~= '' then return tonumber(now) end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function num(x) return string.format('%.0f', x) end
