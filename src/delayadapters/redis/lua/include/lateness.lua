-- How late jobs were released. Needs: counts.lua. A histogram: counter 'late:<upper bound, microseconds>' for each bucket
-- (not cumulative), 'late:sum' in microseconds. jobs.py has the same bounds.
local BOUNDS = {
  500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000, 30000000,
  60000000, 300000000,
}
-- Of the bucket that the last job fell into: mostly the next one falls into it, too.
local late_sum, late_counts, above, upto, within = 0, {}, 0, -1, 0
local function note_late(late, by)
  if late < 0 then late = 0 end
  late_sum = late_sum + late * by
  if late > above and late <= upto then
    within = within + by
    return
  end
  late_counts[upto] = (late_counts[upto] or 0) + within
  above, upto, within = -1, math.huge, by
  for i = 1, #BOUNDS do
    if late <= BOUNDS[i] then
      upto = BOUNDS[i]
      break
    end
    above = BOUNDS[i]
  end
end
local function write_late()
  late_counts[upto] = (late_counts[upto] or 0) + within
  for bound, by in pairs(late_counts) do
    count_up('late:' .. (bound == math.huge and 'inf' or num(bound)), by)
  end
  count_up('late:sum', late_sum)
end
