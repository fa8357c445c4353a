-- Puts a job into arq's queue now, unless its id is taken: by a waiting, queued, running or finished job.
-- keys: due leased dead entries
-- args: job result expires queue channel id score payload ttl limit
-- include: entries byid
-- job, result, expires: the keys of this id. ttl: of the payload, milliseconds. limit: '1' when _expires named it.
-- Returns 1, or 0 when the id is taken. Repeated (a lost answer), it finds its own job and answers 1 again.
local there = redis.call('EXISTS', result) == 1
if not there then
  local found = redis.call('GET', job)
  if found then
    if found == payload and redis.call('ZSCORE', queue, id) == score then return 1 end
    there = true
  end
end
if there then return 0 end
for _, one in ipairs((entries_of(id))) do
  if one.state ~= 'dead' then return 0 end
end
redis.call('PSETEX', job, ttl, payload)
redis.call('ZADD', queue, score, id)
if limit == '1' then
  local time = redis.call('TIME')
  local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ttl
  redis.call('SET', expires, string.format('%.0f', ends), 'PX', ttl)
end
redis.pcall('PUBLISH', channel, '1')
return 1
