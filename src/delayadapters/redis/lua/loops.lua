-- The release loops.
-- keys: watch loops
-- args: now
-- include: clock
-- Returns {now, owner of the watch or '', {owner, its entry, 'beat:' owner, microsecond, ...}}.
return { num(clock()), redis.call('GET', watch) or '', redis.call('HGETALL', loops) }
