"""What the rows are measured against: the seed's heap, and scripts that do the bare minimum."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from typing import Any

CLAIM = """local ids=redis.call('ZRANGE',KEYS[1],'-inf',ARGV[1],'BYSCORE','LIMIT',0,ARGV[2])
if #ids==0 then return {} end
redis.call('ZREM',KEYS[1],unpack(ids))
local a={}
for i=1,#ids do a[2*i-1]=ARGV[3] a[2*i]=ids[i] end
redis.call('ZADD',KEYS[2],unpack(a))
return {ids,redis.call('HMGET',KEYS[3],unpack(ids))}"""
"""Due ids into a lease set, with their payloads (keys: due, leased, payloads; args: now, limit, deadline)."""

ACK = "redis.call('ZREM',KEYS[1],unpack(ARGV)) redis.call('HDEL',KEYS[2],unpack(ARGV)) return #ARGV"
"""Forgets claimed ids (keys: leased, payloads; args: ids)."""

MOVE = """local ids=redis.call('ZRANGE',KEYS[1],'-inf',ARGV[1],'BYSCORE','LIMIT',0,ARGV[2])
if #ids==0 then return 0 end
local p=redis.call('HMGET',KEYS[2],unpack(ids))
redis.call('ZREM',KEYS[1],unpack(ids))
redis.call('HDEL',KEYS[2],unpack(ids))
redis.call('LPUSH',KEYS[3],unpack(p))
return #ids"""
"""Due payloads into a list (keys: due, payloads, list; args: now, limit)."""

TAKE = """local ids=redis.call('ZRANGE',KEYS[1],'-inf',ARGV[1],'BYSCORE','LIMIT',0,ARGV[2])
if #ids==0 then return {} end
redis.call('ZREM',KEYS[1],unpack(ids)) return ids"""
"""Due ids out of a sorted set, and nothing else (keys: due; args: now, limit)."""


class HeapQueue:
    """The seed's in-memory queue: a heap, and an Event that wakes every consumer on every put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._put = asyncio.Event()
        self._count = itertools.count()

    def put(self, item: Any, due: float) -> None:
        heapq.heappush(self._heap, (due, next(self._count), item))
        self._put.set()

    async def get(self) -> tuple[float, int, Any]:
        while True:
            wait = None
            if self._heap:
                wait = self._heap[0][0] - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._heap)
            self._put.clear()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._put.wait(), wait)
