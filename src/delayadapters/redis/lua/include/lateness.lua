-- How late jobs were released. Needs: counts.lua. A histogram: counter 'late:<upper bound, microseconds>' for each bucket
-- (not cumulative), 'late:sum' in microseconds. jobs.py has the same bounds.
local BOUNDS = {
  500, 1000, 2500, 5000, 10000, 25000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000, 30000000,
  60000000, 300000000,
}
-- Of the bucket that the last job fell into, jobs and microseconds together: mostly the next one falls into it, too.
-- late_buckets has those of the others, as {bucket, jobs, microseconds}, buckets counted from 0.
local late_buckets, bucket = {}, 0
local above, upto, jobs_here, micros_here = 0, -1, 0, 0
local function close_bucket()
  local one = late_buckets[bucket] or { bucket - 1, 0, 0 }
  one[2], one[3] = one[2] + jobs_here, one[3] + micros_here
  late_buckets[bucket] = bucket > 0 and one or nil
  jobs_here, micros_here = 0, 0
end
local function note_late(late, by)
  if late < 0 then late = 0 end
  if late <= above or late > upto then
    close_bucket()
    bucket = 1
    while bucket <= #BOUNDS and late > BOUNDS[bucket] do bucket = bucket + 1 end
    above, upto = BOUNDS[bucket - 1] or -1, BOUNDS[bucket] or math.huge
  end
  jobs_here, micros_here = jobs_here + by, micros_here + late * by
end
-- Answers them, flat.
local function write_late()
  local total, flat = 0, {}
  close_bucket()
  for k, one in pairs(late_buckets) do
    count_up('late:' .. (BOUNDS[k] and num(BOUNDS[k]) or 'inf'), one[2])
    total = total + one[3]
    for n = 1, 3 do flat[#flat + 1] = one[n] end
  end
  count_up('late:sum', total)
  return flat
end
