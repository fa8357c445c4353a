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
-- Takes the direct jobs of a batch one after the other, by their index in it, and runs them in that order:
-- add(i): whatever its commands are. push(i, push, payload): it is this push. finish(): runs what is gathered; answers
-- the fields of those released, and a list of {job, error}.
local function direct_line(list, records, fields, at)
  local done, failed = {}, {}
  -- The run: {verb, key, value, ...}, whose jobs they are, and the push all of them have.
  local words, which, count, like
  local function ended(i, job, err)
    if err then
      failed[#failed + 1] = { job or read_job(list[i], records[i], at), err }
    else
      done[#done + 1] = fields[i]
    end
  end
  local function flush()
    if not words then return end
    local err = run_one(words)
    for k = 1, count do ended(which[k], nil, err) end
    words, like = nil, nil
  end
  local function gather(i, verb, key, value)
    if words and (words[1] ~= verb or words[2] ~= key) then flush() end
    if not words then words, which, count = { verb, key }, {}, 0 end
    count = count + 1
    words[count + 2], which[count] = value, i
  end
  local line = {}
  function line.push(i, push, payload)
    if push ~= like then
      gather(i, push[1], push[2], payload)
      like = push
    else
      count = count + 1
      words[count + 2], which[count] = payload, i
    end
  end
  function line.add(i)
    like = nil
    local read, job = pcall(read_job, list[i], records[i], at)
    local only = read and job.count == 1 and job.todo[1]
    if not read then
      ended(i, { entry = list[i], record = records[i], state = { 0, 0, '', 0 }, broken = true }, 'unreadable commands')
    elseif only and #only == 3 and (only[1] == 'LPUSH' or only[1] == 'RPUSH') then
      gather(i, only[1], only[2], only[3])
    else
      flush()
      ended(i, job, run_each(job))
    end
  end
  function line.finish()
    flush()
    return done, failed
  end
  return line
end
