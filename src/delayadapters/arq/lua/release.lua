-- Puts a job from a delay queue on another Redis into arq's queue; the commands of a direct release as a script.
-- keys: due
-- args: job result expires retry queue channel id score payload ttl limit tries
-- ttl: of the payload, milliseconds, when limit, the instant (ms) that _expires named, is ''. tries: '' or how often
-- the job was started.
-- Returns 1, or 0 when it has finished already (published twice).
if redis.call('EXISTS', result) == 1 then return 0 end
if limit == '' then
  redis.call('PSETEX', job, ttl, payload)
else
  -- In the past it stores nothing: arq then records that the job expired.
  redis.call('SET', job, payload, 'PXAT', limit)
  redis.call('SET', expires, limit, 'PXAT', limit)
end
if tries ~= '' then redis.call('SET', retry, tries, 'PX', 88400000) end
redis.call('ZADD', queue, 'NX', score, id)
redis.pcall('PUBLISH', channel, '1')
return 1
