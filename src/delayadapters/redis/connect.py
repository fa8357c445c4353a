"""Client options, retry pauses and what the two executors share. No I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio
from redis import connection as sync_pool
from redis import sentinel as sync_sentinel
from redis.asyncio import sentinel as async_sentinel
from redis.asyncio.connection import BlockingConnectionPool as AsyncBlockingPool
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from ..errors import ReplicationTimeout
from .commands import Call, Plain
from .faults import sent

__all__ = [
    "Options",
    "Waiting",
    "check_wait",
    "client_options",
    "describe",
    "is_cluster",
    "loop_client",
    "never_decode",
    "next_pause",
    "try_seconds",
]

_OWN: Final = ("max_payload", "wait_replicas", "wait_aof", "wait_timeout")
LOOP_TIMEOUT: Final = 3.0
"""Seconds in which a release loop takes a silent Redis for hanging."""
_PLAIN_POOLS: Final = (sync_pool.ConnectionPool, sync_pool.BlockingConnectionPool, AsyncPool, AsyncBlockingPool)
_SENTINEL_POOLS: Final = (sync_sentinel.SentinelConnectionPool, async_sentinel.SentinelConnectionPool)
_REFUSED_TRIES: Final = 4
"""A server that refuses connections is given about a second to come back; one that is silent, the whole time-out."""
_FAILING_OVER: Final = (sync_sentinel.MasterNotFoundError, async_sentinel.MasterNotFoundError)
"""Sentinel has no master for the seconds that a failover takes: it is given the whole time-out, too."""


class Options:
    """Tells a queue's options from its client's."""

    @staticmethod
    def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {key: value for key, value in options.items() if key in _OWN}
        return own, {key: value for key, value in options.items() if key not in _OWN}


def describe(request: Call[Any] | Plain[Any]) -> str:
    """The operation's name, for messages."""
    return request.script.name if isinstance(request, Call) else str(request.commands[0][0])


def client_options(timeout: float, options: dict[str, Any], *, asynchronous: bool = False) -> dict[str, Any]:
    """redis-py options for a client whose retries are ours: three tries of a silent server fit into ``timeout``."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    share = try_seconds(timeout)
    return {
        "socket_timeout": share,
        "socket_connect_timeout": share,
        "retry": (AsyncRetry if asynchronous else Retry)(NoBackoff(), 0),
        **options,
    }


def check_wait(own: dict[str, Any], client: dict[str, Any]) -> None:
    """Refuses a ``wait_timeout`` that a try's time-out would cut short: the outcome would be unknown, not late.

    Raises:
        ValueError: it is not shorter.
    """
    limit, wait = client["socket_timeout"], own.get("wait_timeout", 1.0)
    if (own.get("wait_replicas") or own.get("wait_aof")) and limit is not None and wait >= limit:
        raise ValueError(f"wait_timeout={wait} must be shorter than a try's time-out, {limit:.3g} s (0.3 × timeout)")


def try_seconds(timeout: float) -> float:
    """How long one try may be silent."""
    return timeout * 0.3


def next_pause(attempt: int, error: BaseException, deadline: float | None, longest: float) -> float | None:
    """Seconds to wait before one more try, or None to give up.

    ``deadline``: monotonic; None: no retry. No try begins that could not end by then, being silent for ``longest``.
    """
    if deadline is None or isinstance(error, AuthenticationError):
        return None
    if attempt >= _REFUSED_TRIES and not sent(error) and not isinstance(error, _FAILING_OVER):
        return None
    pause = min(1.0, 0.05 * 3 ** (attempt - 1)) * random.uniform(0.7, 1.0)
    return pause if time.monotonic() + pause + longest <= deadline else None


def never_decode(client: Any) -> dict[str, Any]:
    """The option that makes a ``decode_responses=True`` client hand over bytes: records are not text."""
    pool = getattr(client, "connection_pool", None)
    kwargs = pool.connection_kwargs if pool is not None else getattr(client, "connection_kwargs", None) or {}
    if kwargs.get("decode_responses"):
        return {"NEVER_DECODE": True}
    encoder = getattr(client, "encoder", None)
    return {"NEVER_DECODE": True} if getattr(encoder, "decode_responses", False) else {}


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting for replicas or the append-only file after a write."""

    replicas: int
    aof: bool
    timeout: float

    @classmethod
    def of(cls, replicas: int, aof: bool, timeout: float) -> Waiting | None:
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
            raise ValueError(f"wait_replicas must be a number of replicas, got {replicas!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"wait_timeout must be a positive number of seconds, got {timeout!r}")
        return cls(replicas, bool(aof), timeout) if replicas or aof else None

    @property
    def command(self) -> tuple[str | int, ...]:
        millis = max(1, round(self.timeout * 1000))
        return ("WAITAOF", 1, self.replicas, millis) if self.aof else ("WAIT", self.replicas, millis)

    def judge(self, answer: Sequence[object] | int, confirmed: int | Sequence[int] | Exception) -> None:
        """Raises when what the script stored was not confirmed. ``answer``: what ``commands.schedule`` parsed; a number
        and a list of ids say that nothing was stored, and then nothing needs to be confirmed."""
        if isinstance(answer, int) or (answer and isinstance(answer[0], str)):
            return
        if isinstance(confirmed, Exception):
            raise ReplicationTimeout(self._complaint(confirmed)) from confirmed
        if not self._enough(confirmed):
            raise ReplicationTimeout(self._complaint(confirmed))

    def _enough(self, reply: int | Sequence[int]) -> bool:
        if isinstance(reply, int):
            return reply >= self.replicas
        return int(reply[0]) >= 1 and int(reply[1]) >= self.replicas

    def _complaint(self, reply: int | Sequence[int] | Exception) -> str:
        wanted = f"{self.replicas} replicas" + (" and the append-only file" if self.aof else "")
        return (
            f"stored, but not confirmed by {wanted} within wait_timeout={self.timeout} s "
            f"({self.command[0]} answered {reply}); the job will still be released"
        )


def is_cluster(client: Any) -> bool:
    """Whether a client speaks to several servers, and chooses one for commands without a key by itself."""
    return hasattr(client, "nodes_manager")


def loop_client(client: Any) -> Any:
    """A client like ``client`` for a release loop: own connections, bytes, short time-outs, no retries of its own.

    A release loop must notice a hanging socket, and repeats its requests itself. A Sentinel's client asks the same
    Sentinels. Clients of another kind (RedisCluster) are used as they are.
    """
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (*_PLAIN_POOLS, *_SENTINEL_POOLS):
        return client
    own = ("max_connections", "timeout", "connection_pool")
    kwargs = {key: value for key, value in pool.connection_kwargs.items() if key not in own}
    asynchronous = isinstance(pool, AsyncPool)
    kwargs.update(
        decode_responses=False,
        socket_timeout=LOOP_TIMEOUT,
        socket_connect_timeout=LOOP_TIMEOUT,
        retry=(AsyncRetry if asynchronous else Retry)(NoBackoff(), 0),
        retry_on_error=[],
        retry_on_timeout=False,
        health_check_interval=0,
    )
    kwargs["connection_class"] = pool.connection_class
    if type(pool) in _SENTINEL_POOLS:
        kwargs |= {"is_master": pool.is_master, "check_connection": pool.check_connection}
        made = type(pool)(pool.service_name, pool.sentinel_manager, **kwargs)
    else:
        made = (AsyncPool if asynchronous else sync_pool.ConnectionPool)(**kwargs)
    # from_pool: closing the client closes its connections.
    return (redis.asyncio.Redis if asynchronous else redis.Redis).from_pool(made)
