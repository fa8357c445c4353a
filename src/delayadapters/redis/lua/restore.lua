-- Takes in jobs that were exported elsewhere. One that came before, by its token, is skipped, whatever became of it here.
-- keys: due leased dead entries seq calls calls_old imported counts
-- args: now call keep wake jobs
-- include: clock entries byid once wake counts
-- jobs: msgpack, flat: id, token, state, score, due, flags, tail, ... state: waiting | dead; score: the microsecond at
-- which to release it, or of its death. keep: milliseconds for which tokens are remembered after the last import.
-- Returns a letter a job: i taken in | s skipped.
local before = answered()
if before then return before end
-- A key of another type must show itself before the first write.
redis.call('ZCARD', due)
redis.call('ZCARD', leased)
redis.call('ZCARD', dead)
redis.call('HLEN', entries)
redis.call('SCARD', imported)
local list = cmsgpack.unpack(jobs)
local at, said, taken, earliest = clock(), {}, 0, nil
local _, head = head_of(due)
local number = 2 * redis.call('INCRBY', seq, #list / 7)
local first = number - 2 * (#list / 7 - 1)
for i = 1, #list / 7 do
  local id, token, state, score, due_at, flags, tail = unpack(list, 7 * i - 6, 7 * i)
  if redis.call('SADD', imported, token) == 0 then
    said[i] = 's'
  else
    local mint = first + 2 * (i - 1)
    local is_free = field_free(id, redis.call('HGET', entries, id))
    if not is_free then mint = mint + 1 end
    local packed = struct.pack('>I6', mint)
    local entry = packed .. id
    redis.call('ZADD', state == 'dead' and dead or due, num(score), entry)
    redis.call('HSET', entries, field_of(entry), string.char(flags) .. packed .. struct.pack('>I7', due_at) .. tail)
    if not is_free then
      local key = '\255' .. id
      redis.call('HSET', entries, key, (redis.call('HGET', entries, key) or '') .. packed)
    end
    if state ~= 'dead' and (not earliest or score < earliest) then earliest = score end
    said[i] = 'i'
    taken = taken + 1
  end
end
redis.call('PEXPIRE', imported, keep)
count_up('scheduled', taken)
if earliest then wake_if_earlier(earliest, head) end
return answer(table.concat(said), at)
