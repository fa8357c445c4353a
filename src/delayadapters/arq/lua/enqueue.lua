-- Puts a job into arq's queue now, unless its id is taken: by a waiting, queued, running or finished job.
-- keys: due leased dead entries calls calls_old
-- args: now call job result expires queue channel id score payload ttl limit
-- include: clock entries byid once
-- job, result, expires: the keys of this id. ttl: of the payload, milliseconds. limit: '1' when _expires named it.
-- call: a token when the client repeats commands whose answer was lost, else ''.
-- Returns '1', or '0' when the id is taken.
if call ~= '' then
  local before = answered()
  if before then return before end
end
if redis.call('EXISTS', job, result) > 0 then return '0' end
for _, one in ipairs((entries_of(id))) do
  if one.state ~= 'dead' then return '0' end
end
redis.call('PSETEX', job, ttl, payload)
redis.call('ZADD', queue, score, id)
if limit == '1' then
  local time = redis.call('TIME')
  local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ttl
  redis.call('SET', expires, string.format('%.0f', ends), 'PX', ttl)
end
redis.pcall('PUBLISH', channel, '1')
if call ~= '' then answer('1', clock()) end
return '1'
