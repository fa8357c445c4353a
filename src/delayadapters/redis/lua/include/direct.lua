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
  local members, count, failed, broke = {}, 0, {}, {}
  -- The run: {verb, key, value, ...}, where in `members` it begins, and the push all of them have.
  local words, begin, like
  local function fail(i, job, err)
    failed[#failed + 1] = { job or read_job(list[i], records[i], at), err }
    broke[i] = true
  end
  local function flush()
    if not words then return end
    local err = run_one(words)
    for k = begin, err and count or 0 do fail(members[k], nil, err) end
    words, like = nil, nil
  end
  local function gather(i, verb, key, value)
    if words and (words[1] ~= verb or words[2] ~= key) then flush() end
    if not words then words, begin = { verb, key }, count + 1 end
    count = count + 1
    members[count], words[count - begin + 3] = i, value
  end
  local line = {}
  function line.push(i, push, payload)
    if push ~= like then
      gather(i, push[1], push[2], payload)
      like = push
    else
      count = count + 1
      members[count], words[count - begin + 3] = i, payload
    end
  end
  function line.add(i)
    like = nil
    local read, job = pcall(read_job, list[i], records[i], at)
    local only = read and job.count == 1 and job.todo[1]
    if only and #only == 3 and (only[1] == 'LPUSH' or only[1] == 'RPUSH') then
      gather(i, only[1], only[2], only[3])
      return
    end
    local err = 'unreadable commands'
    if read then
      flush()
      err = run_each(job)
    else
      job = { entry = list[i], record = records[i], state = { 0, 0, '', 0 }, broken = true }
    end
    count = count + 1
    members[count] = i
    if err then fail(i, job, err) end
  end
  function line.finish()
    flush()
    if count == #list and #fields == count and #failed == 0 then return fields, failed end
    local done = {}
    for k = 1, count do
      if not broke[members[k]] then done[#done + 1] = fields[members[k]] end
    end
    return done, failed
  end
  return line
end
