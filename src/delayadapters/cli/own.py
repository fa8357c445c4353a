"""The queue that ``delayadapters --url … --name …`` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from .desk import Desk, desk_of

if TYPE_CHECKING:
    from ..jobs import Job
    from ..redis.sync import DelayQueue

__all__ = ["OwnQueue", "own_queue"]

_SAID: Final[Mapping[str, str]] = {
    "in_flight": "being released right now; too late for the delay queue",
    "released": "already released; too late for the delay queue",
    "not_found": "no such job in the delay queue",
}
_PREVIEW: Final = 300


@dataclass(frozen=True)
class OwnQueue:
    """The group's options."""

    url: str | None
    name: str
    shards: int
    timeout: float
    cluster: bool = False

    def desk(self) -> Desk:
        return Desk(self.open, said=_SAID, details=_details)

    def connect(self, name: str | None = None, shards: int | None = None) -> DelayQueue:
        """The queue, or another one there.

        Raises:
            RedisFault: no node of the cluster can be reached. (Without a cluster that shows at the first request.)
        """
        from ..redis.sync import DelayQueue

        if not self.url:
            raise click.UsageError("no Redis: give delayadapters --url redis://host:6379/0 or set DELAYADAPTERS_URL")
        make = _cluster_queue if self.cluster else DelayQueue.from_url
        try:
            return make(self.url, name=name or self.name, shards=shards or self.shards, timeout=self.timeout)
        except (ValueError, TypeError) as error:
            raise click.UsageError(f"--url, --name: {error}") from error

    @contextmanager
    def open(self, ctx: click.Context) -> Iterator[DelayQueue]:
        with self.connect() as queue:
            yield queue


def _cluster_queue(url: str, *, name: str, shards: int, timeout: float) -> DelayQueue:
    """``DelayQueue.from_url``, but on a Redis Cluster; ``url`` names any of its nodes."""
    from redis.cluster import RedisCluster
    from redis.exceptions import RedisClusterException, RedisError

    from ..redis.connect import client_options
    from ..redis.faults import translate
    from ..redis.sync import DelayQueue

    try:
        client = RedisCluster.from_url(url, **client_options(timeout, {}))
    except (RedisClusterException, RedisError, OSError) as error:
        told = str(error)
        if isinstance(error, RedisClusterException):
            if "mode is not enabled" in told or "support disabled" in told:
                raise click.UsageError("--cluster: this server is not part of a Redis Cluster") from error
            if "cannot be connected" not in told:  # of the URL: a database, a Unix socket
                raise click.UsageError(f"--cluster: {told}") from error
        raise translate(error, "connect", [], maybe_done=False) from error
    queue = DelayQueue(client, name=name, shards=shards)
    queue._own(timeout)
    return queue


def own_queue(ctx: click.Context) -> OwnQueue:
    """The group's options, for verbs that only this command has."""
    own: OwnQueue = ctx.find_object(OwnQueue)  # type: ignore[assignment]  # main() has made it
    desk_of(ctx)
    return own


def _details(job: Job) -> dict[str, Any]:
    """The rest of the meta, and what the payload looks like."""
    meta = {name: value for name, value in job.meta.items() if name not in ("task", "queue")}
    text = job.payload[:_PREVIEW].decode("utf-8", "replace")
    if text and sum(c.isprintable() for c in text) < 0.8 * len(text):
        text = job.payload[:_PREVIEW].hex(" ")
    if len(job.payload) > _PREVIEW:
        text += " …"
    return {"meta": meta, "bytes": len(job.payload), "payload": text}
