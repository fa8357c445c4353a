-- The shard in numbers.
-- keys: due leased dead
-- args: now
-- include: clock
-- Returns {now, waiting, due, leased, dead, score of the head or ''}.
local at = clock()
local head = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
return {
  num(at),
  num(redis.call('ZCARD', due)),
  num(redis.call('ZCOUNT', due, '-inf', num(at))),
  num(redis.call('ZCARD', leased)),
  num(redis.call('ZCARD', dead)),
  head[2] and num(tonumber(head[2])) or '',
}
