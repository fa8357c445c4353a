-- The queue's counters. Needs: clock.lua; keys: counts. Once a script and counter, never once a job; after the script's
-- first write, and only where it changes something: a repeated call counts nothing. Under pcall, because a job is worth
-- more than its number: without the right to HINCRBY nothing is counted.
local function count_up(what, by)
  if by ~= 0 then redis.pcall('HINCRBY', counts, what, num(by)) end
end
