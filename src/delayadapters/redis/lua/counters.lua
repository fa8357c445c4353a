-- What was ever counted.
-- keys: counts
-- args:
-- Returns {counter, number, ...}.
return redis.call('HGETALL', counts)
