-- Direct release: the commands in a record, run in the step that removes the entry. Needs: entries, recipe.
-- Redis does not roll a script back. So each command runs under pcall, and the record of a job whose k-th command fails
-- keeps "k - 1 commands done": the retry goes on at the k-th, and none runs twice.
-- A command {4, key} is a guard: when the key exists, the rest is not run and the job counts as released.
-- A PUBLISH that is refused (ACL) is no failure.
-- A run of jobs with one LPUSH or RPUSH each to the same key becomes one command: the same pushes in the same order.
local function run_one(words)
  local ok, reply = pcall(redis.pcall, unpack(words))
  if not ok then return tostring(reply) end
  return type(reply) == 'table' and reply.err or nil
end
-- The commands of one job, one by one. Answers the error of the one that failed.
local function run_each(job)
  for _, words in ipairs(job.todo) do
    local err
    if words[1] == UNLESS_EXISTS then
      local there = redis.pcall('EXISTS', words[2])
      if there == 1 then return nil end
      err = type(there) == 'table' and there.err or nil
    else
      err = run_one(words)
      -- A message to whoever waits for the job. Without it the job is late, not unreleased.
      if words[1] == 'PUBLISH' then err = nil end
    end
    if err then return err end
    job.state[4] = job.state[4] + 1
  end
end
-- Runs them all; returns the entries released, and a list of {job, error}.
local function run_direct(list, records, at)
  local done, failed = {}, {}
  local verb, key, values, which
  local push_of = push_reader()
  local function finish(i, job, err)
    if not err then
      done[#done + 1] = list[i]
      return
    end
    failed[#failed + 1] = { job or read_job(list[i], records[i], at), err }
  end
  local function flush()
    if not which then return end
    local err = run_one({ verb, key, unpack(values) })
    for k = 1, #which do finish(which[k], nil, err) end
    which = nil
  end
  local function gather(i, to, onto, value)
    if which and (verb ~= to or key ~= onto) then flush() end
    if not which then verb, key, values, which = to, onto, {}, {} end
    local n = #which + 1
    values[n], which[n] = value, i
  end
  for i = 1, #list do
    local record = records[i]
    local ok, push, payload = pcall(push_of, record)
    if ok and push then
      gather(i, push[1], push[2], payload)
    else
      local read, job = pcall(read_job, list[i], record, at)
      local only = read and job.count == 1 and job.todo[1]
      if not read then
        finish(i, { entry = list[i], record = record, state = { 0, 0, '', 0 }, broken = true }, 'unreadable commands')
      elseif only and #only == 3 and (only[1] == 'LPUSH' or only[1] == 'RPUSH') then
        gather(i, only[1], only[2], only[3])
      else
        flush()
        finish(i, job, run_each(job))
      end
    end
  end
  flush()
  return done, failed
end
