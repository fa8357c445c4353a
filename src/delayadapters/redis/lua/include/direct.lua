-- Direct release: the commands in a record, run in the step that removes the entry. Needs: entries, settle.
-- Redis does not roll a script back. So each command runs under pcall, and the record of a job whose k-th command fails
-- keeps "k - 1 commands done": the retry goes on at the k-th, and none runs twice.
-- A command {4, key} is a guard: when the key exists, the rest is not run and the job counts as released.
-- A PUBLISH that is refused (ACL) is no failure.
-- A run of jobs with one LPUSH or RPUSH each to the same key becomes one command: the same pushes in the same order.
local FILL = {
  [0] = function(job) return job.payload end,
  [1] = function(job) return num(math.floor(job.due / 1000)) end,
  [2] = function(job) return num(math.floor(job.at / 1000)) end,
  [3] = function(job)
    job.salt = (job.salt or 0) + 1
    return string.sub(redis.sha1hex(job.entry .. num(job.at) .. ':' .. job.salt), 1, 32)
  end,
  [5] = function(job) return id_of(job.entry) end,
}
local UNLESS_EXISTS = 4
local function fill(word, job)
  if type(word) == 'number' then return FILL[word](job) end
  if type(word) ~= 'table' then return word end
  local parts = {}
  for i = 1, #word do parts[i] = fill(word[i], job) end
  return table.concat(parts)
end
-- The commands still to run, filled in. Raises for a section that is not one of commands.
local function read_job(entry, record, at)
  local state, after = state_of(record)
  local _, packed
  if flag(record, META) then _, after = struct.unpack('>I4c0', record, after) end
  packed, after = struct.unpack('>I4c0', record, after)
  local commands = cmsgpack.unpack(packed)
  local job = {
    entry = entry, record = record, at = at, due = due_of(record), state = state,
    count = #commands, todo = {}, payload = string.sub(record, after),
  }
  for k = state[4] + 1, #commands do
    local words = {}
    for i, word in ipairs(commands[k]) do
      words[i] = i == 1 and word == UNLESS_EXISTS and word or fill(word, job)
    end
    job.todo[#job.todo + 1] = words
  end
  return job
end
local function run_one(words)
  local ok, reply = pcall(redis.pcall, unpack(words))
  if not ok then return tostring(reply) end
  return type(reply) == 'table' and reply.err or nil
end
-- Runs them all; returns the entries released, and a list of {job, error}.
local function run_direct(list, records, at)
  local done, failed = {}, {}
  local verb, key, values, jobs
  local function flush()
    if not jobs then return end
    local err = run_one({ verb, key, unpack(values) })
    for i = 1, #jobs do
      if err then failed[#failed + 1] = { jobs[i], err } else done[#done + 1] = jobs[i].entry end
    end
    jobs = nil
  end
  for i = 1, #list do
    local ok, job = pcall(read_job, list[i], records[i], at)
    if not ok then
      failed[#failed + 1] = { { entry = list[i], record = records[i], state = { 0, 0, '', 0 }, broken = true }, 'unreadable commands' }
    else
      local only = job.count == 1 and job.todo[1]
      if only and #only == 3 and (only[1] == 'LPUSH' or only[1] == 'RPUSH') then
        if jobs and (verb ~= only[1] or key ~= only[2]) then flush() end
        if not jobs then verb, key, values, jobs = only[1], only[2], {}, {} end
        values[#values + 1] = only[3]
        jobs[#jobs + 1] = job
      else
        flush()
        local err
        for _, words in ipairs(job.todo) do
          if words[1] == UNLESS_EXISTS then
            local there = redis.pcall('EXISTS', words[2])
            if there == 1 then break end
            err = type(there) == 'table' and there.err or nil
          else
            err = run_one(words)
            -- A message to whoever waits for the job. Without it the job is late, not unreleased.
            if words[1] == 'PUBLISH' then err = nil end
          end
          if err then break end
          job.state[4] = job.state[4] + 1
        end
        if err then failed[#failed + 1] = { job, err } else done[#done + 1] = list[i] end
      end
    end
  end
  flush()
  return done, failed
end
