"""What a waiting job is, and how it comes into arq's queue: as commands in its entry, or by a publisher.

A job on arq's own Redis carries the commands of its release (``direct``): the step that removes the entry runs them.
A job on another Redis is published from Python by :class:`ArqPublisher`, with the same effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from redis import exceptions as rx

from ..jobs import Claim, Command, Payload
from ..redis.commands import Call
from ..redis.keys import ShardKeys
from ..redis.records import Packed
from ..redis.scripts import Script, load
from ..release.publisher import Batch, Published
from .settings import (
    EXPIRES_PREFIX,
    RETRY_TTL_MS,
    channel,
    job_key_prefix,
    result_key_prefix,
    retry_key_prefix,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["ArqPublisher", "Deferred", "script"]

log: Final = logging.getLogger("delayadapters.arq")
_DOWN: Final = (rx.ConnectionError, rx.TimeoutError, rx.BusyLoadingError, rx.ReadOnlyError, rx.OutOfMemoryError)
_DOWN_REPLIES: Final = ("OOM", "MISCONF", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "TRYAGAIN", "READONLY", "LOADING")


def script(name: str) -> Script:
    """One of this package's scripts."""
    return load(name, __package__)


@dataclass(frozen=True)
class Deferred:
    """What a waiting job's entry says besides its payload.

    ``expires_ms``: how long the payload lives after release. ``limit``: the instant (ms since the epoch) that
    ``_expires`` named, which wins. ``tries``: how often the job was started before (a retry).
    """

    function: str
    queue: str
    expires_ms: int
    limit: int | None = None
    tries: int | None = None

    @property
    def meta(self) -> dict[str, str]:
        """Of a direct release: what operators see. The commands hold the rest."""
        return {"task": self.function, "queue": self.queue}

    @property
    def full_meta(self) -> dict[str, str]:
        """What :class:`ArqPublisher` needs to know."""
        meta = {**self.meta, "expires_ms": str(self.expires_ms)}
        if self.limit is not None:
            meta["limit"] = str(self.limit)
        if self.tries is not None:
            meta["tries"] = str(self.tries)
        return meta

    @classmethod
    def of(cls, meta: Mapping[str, str], queue: str, expires_ms: int) -> Deferred:
        """From :attr:`full_meta`; ``queue`` and ``expires_ms`` where it says nothing."""
        limit, tries = meta.get("limit"), meta.get("tries")
        return cls(
            meta.get("task", "<unknown>"),
            meta.get("queue", queue),
            int(meta.get("expires_ms", expires_ms)),
            None if limit is None else int(limit),
            None if tries is None else int(tries),
        )

    def commands(self, name: str) -> Sequence[Command]:
        """The direct release from the delay queue ``name``."""
        if self.limit is None and self.tries is None:
            return _usual(self.queue, self.expires_ms, name)
        return self._commands(name)

    def _commands(self, name: str) -> list[Command]:
        """What a release does.

        A result means that the job has run already, by way of a client that does not know of us. The score in arq's
        queue stays the due time, NX keeps one who is queued where he is.
        """
        out: list[Any] = [(Payload.UNLESS_EXISTS, [result_key_prefix, Payload.ID])]
        job = [job_key_prefix, Payload.ID]
        if self.limit is None:
            out.append(("PSETEX", job, self.expires_ms, Payload.BYTES))
        else:
            # A limit in the past stores nothing: arq then records that the job expired.
            out.append(("SET", job, Payload.BYTES, "PXAT", self.limit))
            out.append(("SET", [EXPIRES_PREFIX, Payload.ID], self.limit, "PXAT", self.limit))
        if self.tries is not None:
            out.append(("SET", [retry_key_prefix, Payload.ID], self.tries, "PX", RETRY_TTL_MS))
        out.append(("ZADD", self.queue, "NX", Payload.DUE_MS, Payload.ID))
        out.append(("PUBLISH", channel(name, self.queue), "1"))
        return out


@lru_cache(256)
def _usual(queue: str, expires_ms: int, name: str) -> Packed:
    return Packed(Deferred("", queue, expires_ms)._commands(name))


class ArqPublisher:
    """Puts claimed jobs into arq's queue on ``client``'s Redis. Repeated for a job that still runs or has a result, it
    changes nothing."""

    def __init__(self, client: Redis, name: str, *, queue: str, expires_ms: int) -> None:
        self._client = client
        self._name = name
        self._queue = queue
        self._expires_ms = expires_ms
        self._keys = ShardKeys.of(name, 0)

    async def publish(self, claims: Batch) -> Published | None:
        failed: dict[bytes, str] = {}
        for done in range(0, len(claims), 50):
            claims.ensure_held()
            chunk = claims[done : done + 50]
            calls: list[tuple[Claim, Call[Any]]] = []
            for claim in chunk:
                try:
                    calls.append((claim, self._call(claim)))
                except ValueError as error:
                    failed[claim.entry] = f"unreadable meta of an arq job, {error}: {dict(claim.meta)!r:.500}"
            try:
                replies = await self._send([call for _, call in calls])
            except (*_DOWN, OSError) as error:
                rest = [claim.entry for claim in claims[done:]]
                return Published(failed, rest, f"{type(error).__name__}: {error}")
            for (claim, _), reply in zip(calls, replies, strict=True):
                if isinstance(reply, Exception):
                    if isinstance(reply, _DOWN) or str(reply).startswith(_DOWN_REPLIES) or "OOM" in str(reply):
                        sent = {
                            one.entry
                            for one, r in zip((c for c, _ in calls), replies, strict=True)
                            if not isinstance(r, Exception)
                        }
                        rest = [one.entry for one in claims[done:] if one.entry not in sent and one.entry not in failed]
                        return Published(failed, rest, f"{type(reply).__name__}: {reply}")
                    failed[claim.entry] = f"{type(reply).__name__}: {reply}"
                elif reply == 0:
                    log.debug("arq job %s has a result already: not released again", claim.id)
        return Published(failed) if failed else None

    def _call(self, claim: Claim) -> Call[Any]:
        job = Deferred.of(claim.meta, self._queue, self._expires_ms)
        one = script("release")
        bound = one.bind(
            self._keys,
            job=job_key_prefix + claim.id,
            result=result_key_prefix + claim.id,
            expires=EXPIRES_PREFIX + claim.id,
            retry=retry_key_prefix + claim.id,
            queue=job.queue,
            channel=channel(self._name, job.queue),
            id=claim.id,
            score=claim.due // 1000,
            payload=claim.payload,
            ttl=job.expires_ms,
            limit="" if job.limit is None else job.limit,
            tries="" if job.tries is None else job.tries,
        )
        return Call(one, *bound, int, self._keys)

    async def _send(self, calls: list[Call[Any]], *, whole: bool = False) -> list[Any]:
        """One round trip; replies or exceptions. Scripts that the server does not know are sent whole."""
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            head = ("EVAL", call.script.text) if whole else ("EVALSHA", call.script.sha)
            pipe.execute_command(*head, len(call.keys), *call.keys, *call.args)
        replies = await pipe.execute(raise_on_error=False)
        if not whole and any(isinstance(reply, rx.NoScriptError) for reply in replies):
            missing = [i for i, reply in enumerate(replies) if isinstance(reply, rx.NoScriptError)]
            again = await self._send([calls[i] for i in missing], whole=True)
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        return list(replies)
