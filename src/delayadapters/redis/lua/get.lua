-- One entry of an id: the earliest waiting, else a leased one, else a dead one.
-- keys: due leased dead entries
-- args: id
-- include: entries byid
-- Returns {} or {state, score, record}.
local found = entries_of(id)
local best
local rank = { waiting = 1, leased = 2, dead = 3 }
for _, one in ipairs(found) do
  if not best or rank[one.state] < rank[best.state] then best = one end
end
if not best then return {} end
return { best.state, string.format('%.0f', best.score), best.record }
