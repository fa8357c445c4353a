-- One turn of a release loop: acks what it published, re-queues expired leases, then claims what is due.
-- keys: due leased dead entries watch loops calls calls_old released released_old released_new counts
-- args: now owner call about length limit max_bytes watch_ms help retry_base retry_cap max_attempts wake fence late acks...
-- include: clock entries fetch lease released settle recipe direct wake counts lateness sweep
-- owner, call: who asks, and a number that is repeated when the same request is: its batch is then answered again.
-- about: what to show of this loop. length: of the lease, microseconds. limit, max_bytes: of a batch.
-- watch_ms: > 0 to take or renew the watch. help: '1' to call others when due work is left to publish.
-- retry_base, retry_cap (microseconds), max_attempts: for a direct release that fails.
-- fence, acks: the deadline and the entries of a published batch. late: msgpack {counter, number, ...}, how late they
-- were published ('' for none).
-- Returns {msgpack {now, head or -1, next lease deadline or -1, watch: 1 ours | 0 not asked | -milliseconds left of
-- somebody else's, deadline of the batch, acked, requeued, direct, greatest lateness of those, script time in
-- microseconds, {bucket, jobs, microseconds late together, ...} of the direct ones}, msgpack notes {{id, what, reason}, ...}, {entry, ...}, {record, ...}}.

local at = clock()
local notes, requeued, direct, latest, acked = {}, 0, 0, 0, 0
local late_direct = {}
local taken, records, deadline = {}, {}, 0
local mine = redis.call('HGET', loops, owner)
-- A key of another type must show itself before the first write.
redis.call('ZCARD', due)
redis.call('ZCARD', dead)
redis.call('HLEN', entries)
redis.call('SCARD', released)
redis.call('LLEN', released_new)
local holder = redis.call('GET', watch)
local last_call, last_deadline = string.match(mine or '', '^(%S+) (%S+)')
local worked = false

-- A request that a slow network brings after a later one of the same loop, or after its end: nobody waits for its answer.
local left = not mine and (redis.call('HGET', calls, 'left:' .. owner) or redis.call('HGET', calls_old, 'left:' .. owner))
if left or overtaken(last_call) then
  return { cmsgpack.pack({ at, -1, -1, 0, 0, 0, 0, 0, 0, 0, {} }), cmsgpack.pack({}), {}, {} }
end
if last_call == call then
  -- The reply to this very request was lost: the acks are done, and the batch is still ours where nobody took it.
  acked = #ARGV - acks_at + 1
  taken = redis.call('ZRANGE', leased, last_deadline, last_deadline, 'BYSCORE')
  deadline = tonumber(last_deadline)
  if #taken > 0 then
    -- The fence stays while half of the lease is left: the first answer may have arrived after all, and then this is a
    -- copy that comes late. After that a loop at work has renewed, and its copy is overtaken.
    if deadline - at < tonumber(length) / 2 then
      -- Removing first makes the script one that has written, which maxmemory then lets finish.
      redis.call('ZREM', leased, unpack(taken))
      deadline = new_deadline(at, tonumber(length))
      lease_all(taken, deadline)
      worked = true
    end
    records = redis.call('HMGET', entries, unpack((fields_of(taken))))
  end
else
  if #ARGV >= acks_at then
    local list = {}
    for i = acks_at, #ARGV do list[i - acks_at + 1] = ARGV[i] end
    acked = ack_all(list, tonumber(fence))
    count_up('released', acked)
    local published = late ~= '' and cmsgpack.unpack(late) or {}
    for i = 1, #published, 2 do count_up(published[i], published[i + 1]) end
    worked = true
  end

  local _, expires = head_of(leased)
  if expires and expires <= at and tonumber(limit) > 0 then
    local gone = redis.call('ZRANGE', leased, '-inf', num(at), 'BYSCORE', 'LIMIT', 0, limit)
    local had = fetch(gone, tonumber(max_bytes))
    gone = first(gone, #had)
    redis.call('ZREM', leased, unpack(gone))
    for i = 1, #gone do
      if not had[i] then
        notes[#notes + 1] = { id_of(gone[i]), 'dropped', 'no record' }
      elseif readable(had[i]) then
        local state = state_of(had[i])
        redis.call('HSET', entries, field_of(gone[i]), with_state(had[i], { state[1], state[2] + 1, state[3], state[4] }))
        redis.call('ZADD', due, num(due_of(had[i])), gone[i])
        requeued = requeued + 1
      else
        bury(gone[i], had[i], at, 'unreadable record')
        notes[#notes + 1] = { id_of(gone[i]), 'dead', 'unreadable record' }
      end
    end
    count_up('requeued', requeued)
    worked = true
  end

  local ready = tonumber(limit) > 0 and redis.call('ZRANGE', due, '-inf', num(at), 'BYSCORE', 'LIMIT', 0, limit) or {}
  if #ready > 0 then
    worked = true
    local got, fields, mixed = fetch(ready, tonumber(max_bytes))
    ready = first(ready, #got)
    -- They are the first of the set, so they need not be looked up one by one.
    redis.call('ZREMRANGEBYRANK', due, 0, #ready - 1)
    local line = direct_line(ready, got, fields, at)
    local directs = false
    for i = 1, #ready do
      local record = got[i]
      local payload = record and same_push(record)
      local bits = not payload and record and readable(record)
      if payload then
        note_late(at - unpack_struct('>I7', record, 8), 1)  -- due_of, without the call
        line.push(i, last_push, payload)
      elseif not record then
        notes[#notes + 1] = { id_of(ready[i]), 'dropped', 'no record' }
      elseif not bits then
        bury(ready[i], record, at, 'unreadable record')
        notes[#notes + 1] = { id_of(ready[i]), 'dead', 'unreadable record' }
      elseif bits % (2 * DIRECT) >= DIRECT then
        -- In due order, the first is the latest; only after a retry is a job's due time before its place.
        local late = at - due_of(record)
        if not directs or bits % 2 == 1 then latest = math.max(latest, late) end
        directs = true
        note_late(late, 1)
        local ok, push, value = pcall(read_push, record)
        if ok and push then line.push(i, push, value) else line.add(i) end
      else
        local n = #taken + 1
        taken[n], records[n] = ready[i], record
      end
    end
    if directs then
      local done, failed = line.finish()
      direct = #done
      note_released(forget_fields(done, mixed))
      for _, one in ipairs(failed) do
        local job, reason = one[1], one[2]
        note_late(at - due_of(job.record), -1)
        local full = string.sub(reason, 1, 3) == 'OOM' or string.find(reason, ' OOM ', 1, true)
        local attempts = job.state[1] + (full and 0 or 1)
        if job.broken or attempts >= tonumber(max_attempts) then
          local record = job.broken and job.record or with_state(job.record, { attempts, job.state[2], reason, job.state[4] })
          bury(job.entry, record, at, reason)
          notes[#notes + 1] = { id_of(job.entry), 'dead', reason }
        else
          local pause = math.min(tonumber(retry_cap), tonumber(retry_base) * 2 ^ math.max(0, attempts - 1))
          redis.call('HSET', entries, field_of(job.entry), with_state(job.record, { attempts, job.state[2], reason, job.state[4] }))
          redis.call('ZADD', due, num(at + pause), job.entry)
          notes[#notes + 1] = { id_of(job.entry), 'retry', reason }
        end
      end
      count_up('direct', direct)
      count_up('failed', #failed)
      late_direct = write_late()
    end
    if #taken > 0 then
      deadline = new_deadline(at, tonumber(length))
      lease_all(taken, deadline)
    end
  end
end

local _, head = head_of(due)
local _, expires = head_of(leased)
if help == '1' and #taken > 0 and head and head <= at then redis.pcall('PUBLISH', wake, 'help') end

local watching = 0
if tonumber(watch_ms) > 0 then
  local left = holder and redis.call('PTTL', watch) or -1
  -- A watch that lives longer than it was given (no expiry; the server's clock set back) would keep everybody away.
  if holder == owner or left < 0 or left > 2 * tonumber(watch_ms) then
    -- On a full server that has nothing due this SET is refused; then everybody watches, which is harmless.
    redis.pcall('SET', watch, owner, 'PX', watch_ms)
    watching = 1
  else
    watching = -math.max(1, left)
  end
end
local spent = 0
local entry = call .. ' ' .. num(deadline) .. ' ' .. num(at) .. ' ' .. about
if worked then
  redis.call('HSET', loops, owner, entry)
  if now == '' then spent = clock() - at end
else
  redis.pcall('HSET', loops, owner, entry)
end
local died, dropped = 0, 0
for _, note in ipairs(notes) do
  if note[2] == 'dead' then died = died + 1 elseif note[2] == 'dropped' then dropped = dropped + 1 end
end
count_up('dead', died)
count_up('dropped', dropped)
if not mine then sweep_loops(at) end
return {
  cmsgpack.pack({ at, head or -1, expires or -1, watching, deadline, acked, requeued, direct, latest, spent, late_direct }),
  cmsgpack.pack(notes), taken, records,
}
