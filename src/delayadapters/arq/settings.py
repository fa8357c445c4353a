"""Where a deferred job waits, and the names that arq and we give to keys.

======================================  ==============================================================================
``arq:job:<id>``                        the payload; arq's. While a job waits with us it is in our entry instead
``arq:result:<id>``                     the result; arq's
``arq:in-progress:<id>``                a worker runs it; arq's, expires
``arq:retry:<id>``                      how often it was started; arq's, expires
``arq:abort``                           zset, ids that workers should cancel; arq's
``arq:expires:<id>``                    ours, expires with the job: the instant (ms) that ``_expires=`` named, so that a
                                        retry keeps it. Without it a retry's payload lives anew
``{<name>:<shard>}:…``                  ours, the delay queue (docs/reference/keys.md)
``{<name>:0}:released:<arq queue>``     ours, a channel: jobs have come into this arq queue
======================================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from arq.connections import RedisSettings
from arq.constants import in_progress_key_prefix, job_key_prefix, result_key_prefix, retry_key_prefix

from ..due import lease_micros, seconds_to_micros
from ..metrics.address import DEFAULT_HOST, check_address
from ..redis.keys import check_name

__all__ = [
    "DEFAULT_NAME",
    "EXPIRES_PREFIX",
    "RETRY_TTL_MS",
    "DelaySettings",
    "channel",
    "in_progress_key_prefix",
    "job_key_prefix",
    "result_key_prefix",
    "retry_key_prefix",
    "same_redis",
]

DEFAULT_NAME: Final = "delayadapters:arq"
EXPIRES_PREFIX: Final = "arq:expires:"
RETRY_TTL_MS: Final = 88_400_000
"""arq/worker.py, ``run_job``: how long it remembers how often a job was started."""


@dataclass(frozen=True)
class DelaySettings:
    """How jobs are deferred. Alike in every process of an application: clients, workers and ``@delayed``.

    Raises:
        TypeError, ValueError: naming the field.
    """

    redis: str | RedisSettings | None = None
    """The Redis where jobs wait: a URL or ``RedisSettings``. None: arq's own, and then release is exactly once; from
    any other one it is at least once, always under the same job id."""
    name: str = DEFAULT_NAME
    """The delay queue's name. One serves any number of arq queues."""
    shards: int = 1
    embed: bool = True
    """Run the release loop in workers. False: something else does (another worker, ``release_jobs``)."""
    keep_aborted: float = 3600.0
    """Seconds for which the CancelledError result of an aborted waiting job is kept; its id is taken as long. 0: not
    kept. (A worker's ``keep_result`` is not known to the client that aborts.)"""
    lease: float = 30.0
    """Seconds; with a Redis of its own, how late a job comes when the process that was releasing it dies."""
    timeout: float = 10.0
    """Seconds within which a call has succeeded or raised, retries included."""
    metrics_port: int | None = None
    """Workers serve /metrics, /healthz and /readyz there (extra ``metrics``). Workers of one host may name the same
    port: one of them has it, and tells what they all would."""
    metrics_host: str = DEFAULT_HOST
    """The address to listen on; in a container 0.0.0.0."""

    def __post_init__(self) -> None:
        if self.redis is not None and not isinstance(self.redis, (str, RedisSettings)):
            raise TypeError(f"redis must be a URL, arq's RedisSettings or None (arq's own Redis), got {self.redis!r}")
        check_name(self.name)
        if isinstance(self.shards, bool) or not isinstance(self.shards, int) or self.shards < 1:
            raise ValueError(f"shards must be a positive int, got {self.shards!r}")
        if seconds_to_micros(self.keep_aborted, "keep_aborted") < 0:
            raise ValueError(f"keep_aborted must be seconds, 0 or more, got {self.keep_aborted!r}")
        lease_micros(self.lease)
        if seconds_to_micros(self.timeout, "timeout") <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        check_address(self.metrics_port, self.metrics_host)


def channel(name: str, arq_queue: str) -> str:
    """Where it is told that jobs have come into an arq queue. Below the delay queue's own prefix: one ACL pattern."""
    return f"{{{name}:0}}:released:{arq_queue}"


def same_redis(one: Any, other: Any) -> bool:
    """Whether two connection pools lead to one database of one server, as far as they say so (Sentinel's do not)."""

    def place(pool: Any) -> tuple[Any, ...]:
        if hasattr(pool, "service_name"):
            return (id(pool),)
        options: Mapping[str, Any] = pool.connection_kwargs
        if options.get("path"):
            return (options["path"], int(options.get("db") or 0))
        host = options.get("host") or "localhost"
        host = "127.0.0.1" if host == "localhost" else host
        return (host, int(options.get("port") or 6379), int(options.get("db") or 0))

    return place(one) == place(other)
