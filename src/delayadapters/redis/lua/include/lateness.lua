-- How late jobs were released. Needs: counts.lua. A histogram: counter 'late:<upper bound, microseconds>' for each bucket
-- (not cumulative), 'late:sum' in microseconds. jobs.py has the same bounds.
local BOUNDS = {
  500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000, 30000000,
  60000000, 300000000,
}
-- {bucket, jobs, microseconds together}, buckets counted from 0, and the one that the last job fell into: mostly the
-- next one does, too.
local late_buckets = {}
local here, above, upto = nil, 0, -1
local function note_late(late, by)
  if late < 0 then late = 0 end
  if late <= above or late > upto then
    local bucket = 1
    while bucket <= #BOUNDS and late > BOUNDS[bucket] do bucket = bucket + 1 end
    above, upto = BOUNDS[bucket - 1] or -1, BOUNDS[bucket] or math.huge
    here = late_buckets[bucket] or { bucket - 1, 0, 0 }
    late_buckets[bucket] = here
  end
  here[2] = here[2] + by
  here[3] = here[3] + late * by
end
-- Answers them, flat.
local function write_late()
  local total, flat = 0, {}
  for bucket, one in pairs(late_buckets) do
    count_up('late:' .. (BOUNDS[bucket] and num(BOUNDS[bucket]) or 'inf'), one[2])
    total = total + one[3]
    for k = 1, 3 do flat[#flat + 1] = one[k] end
  end
  count_up('late:sum', total)
  return flat
end
