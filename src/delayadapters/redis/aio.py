"""The delay queue over a redis.asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from ..due import Delay
from ..errors import DelayError, RedisFault, WrongKeyType
from ..jobs import Claim, Command, Counters, IfExists, Job, Loop, NewJob, Outcome, Page, Stats
from . import commands, steering
from .commands import Call, Plain
from .connect import Options, Waiting, check_wait, client_options, describe, never_decode, next_pause, try_seconds
from .faults import RETRIABLE, sent, translate
from .verbs import Steps, Verbs

__all__ = ["AsyncDelayQueue"]

T = TypeVar("T")


class AsyncDelayQueue:
    """:class:`~delayadapters.DelayQueue` for asyncio: the same arguments, verbs, outcomes and errors, awaited.

    Args:
        client: a ``redis.asyncio`` client, as for DelayQueue. The caller closes it.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis | Any,
        *,
        name: str = "delayadapters",
        shards: int = 1,
        max_payload: int | None = 1 << 20,
        wait_replicas: int = 0,
        wait_aof: bool = False,
        wait_timeout: float = 1.0,
    ) -> None:
        self._client = client
        self._owned = False
        self._bound: float | None = None
        self._try = 0.0
        self._waiting = Waiting.of(wait_replicas, wait_aof, wait_timeout)
        self._verbs = Verbs(name, shards, max_payload, waiting=self._waiting is not None)

    @classmethod
    def from_url(
        cls, url: str, *, name: str = "delayadapters", shards: int = 1, timeout: float = 10.0, **options: Any
    ) -> AsyncDelayQueue:
        """As :meth:`DelayQueue.from_url <delayadapters.DelayQueue.from_url>`; ``aclose()`` closes the client."""
        own, rest = Options.split(options)
        settings = client_options(timeout, rest, asynchronous=True)
        check_wait(own, settings)
        client = redis.asyncio.Redis.from_url(url, **settings)
        queue = cls(client, name=name, shards=shards, **own)
        queue._owned, queue._bound, queue._try = True, timeout, try_seconds(timeout)
        return queue

    # ------------------------------------------------------------ life

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._verbs.name

    @property
    def client(self) -> Any:
        """The redis.asyncio client."""
        return self._client

    @property
    def _clock(self) -> Callable[[], int] | None:
        return self._verbs.clock

    @_clock.setter
    def _clock(self, clock: Callable[[], int] | None) -> None:
        self._verbs.clock = clock

    async def aclose(self) -> None:
        """Closes the client if the queue made it (``from_url``). Waiting jobs stay in Redis."""
        if self._owned:
            await self._client.aclose()

    async def close(self) -> None:
        """The same as :meth:`aclose`."""
        await self.aclose()

    async def __aenter__(self) -> AsyncDelayQueue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------ the executor

    async def _run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    answer = await self._send(request)
                except DelayError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            steps.close()

    async def _send(self, request: Call[Any] | Plain[Any]) -> Any:
        """One request, repeated for as long as ``from_url`` was told (a caller's own client: once)."""
        deadline = None if self._bound is None else time.monotonic() + self._bound
        attempt, maybe_done = 0, False
        while True:
            try:
                return request.parse(await execute(self._client, request, self._waiting))
            except RETRIABLE as error:
                maybe_done = maybe_done or sent(error) or self._bound is None
                attempt += 1
                pause = next_pause(attempt, error, deadline, self._try)
                if pause is None:
                    raise await self._fault(error, request, maybe_done) from error
                await asyncio.sleep(pause)
            except RedisError as error:
                raise await self._fault(error, request, maybe_done) from error

    async def _fault(self, error: BaseException, request: Call[Any] | Plain[Any], maybe_done: bool) -> RedisFault:
        fault = translate(error, describe(request), [request.shard.due, request.shard.entries], maybe_done=maybe_done)
        if isinstance(fault, WrongKeyType):
            look = commands.types(request.shard)
            try:
                found = look.parse(await execute(self._client, look))
            except RedisError:
                return fault
            return WrongKeyType(f"{fault}; found {commands.wrong_types(request.shard, found)}")
        return fault

    # ------------------------------------------------------------ verbs

    async def schedule(
        self,
        payload: bytes,
        *,
        delay: Delay | None = None,
        at: datetime | None = None,
        id: str | None = None,
        meta: Mapping[str, str] | None = None,
        if_exists: IfExists = "error",
        release: Sequence[Command] | None = None,
    ) -> Job:
        """Stores a job; see :meth:`DelayQueue.schedule <delayadapters.DelayQueue.schedule>`."""
        return await self._run(self._verbs.schedule(payload, delay, at, id, meta, if_exists, release))

    async def schedule_many(self, items: Iterable[NewJob], *, if_exists: IfExists = "error") -> list[Job]:
        """Stores many jobs, up to 200 (or about 1 MiB) a round trip; each round trip stores all of its jobs or none."""
        return await self._run(self._verbs.schedule_many(items, if_exists))

    async def cancel(self, id: str) -> Outcome:
        """CANCELLED (final), or IN_FLIGHT, RELEASED, NOT_FOUND."""
        return await self._run(self._verbs.cancel(id))

    async def reschedule(self, id: str, *, delay: Delay | None = None, at: datetime | None = None) -> Outcome:
        """RESCHEDULED, or IN_FLIGHT, RELEASED, NOT_FOUND."""
        return await self._run(self._verbs.reschedule(id, delay, at))

    async def release_now(self, id: str) -> Outcome:
        """Due now: RESCHEDULED, or IN_FLIGHT, RELEASED, NOT_FOUND."""
        return await self._run(self._verbs.reschedule(id, 0, None))

    async def cancel_many(self, ids: Iterable[str]) -> list[Outcome]:
        """As :meth:`DelayQueue.cancel_many <delayadapters.DelayQueue.cancel_many>`."""
        return await self._run(steering.steer_ids(self._verbs, "cancel", ids))

    async def reschedule_many(
        self, ids: Iterable[str], *, delay: Delay | None = None, at: datetime | None = None
    ) -> list[Outcome]:
        """As :meth:`DelayQueue.reschedule_many <delayadapters.DelayQueue.reschedule_many>`."""
        return await self._run(steering.steer_ids(self._verbs, "reschedule", ids, delay, at))

    async def get(self, id: str) -> Job | None:
        """The earliest waiting entry of an id, else a leased one, else a dead one, else None."""
        return await self._run(self._verbs.get(id))

    async def jobs(self, *, due_before: datetime | None = None, limit: int = 100, cursor: str | None = None) -> Page:
        """A page of waiting jobs in due order; see :meth:`DelayQueue.jobs <delayadapters.DelayQueue.jobs>`."""
        return await self._run(self._verbs.page("due", due_before, limit, cursor))

    async def dead_jobs(self, *, limit: int = 100, cursor: str | None = None) -> Page:
        """A page of dead jobs in order of death, each with its ``reason``."""
        return await self._run(self._verbs.page("dead", None, limit, cursor))

    async def replay(self, id: str) -> Outcome:
        """A dead job waits again, due now, attempts from zero: REPLAYED or NOT_FOUND."""
        return await self._run(self._verbs.revive(id, "replay"))

    async def discard(self, id: str) -> Outcome:
        """Deletes a dead job: DISCARDED or NOT_FOUND."""
        return await self._run(self._verbs.revive(id, "discard"))

    async def purge(self) -> None:
        """Deletes the whole queue, dead jobs and leases included."""
        await self._run(self._verbs.purge())

    async def stats(self) -> Stats:
        """The queue in numbers; constant time however long the queue."""
        return await self._run(self._verbs.stats())

    async def counters(self) -> Counters:
        """What was ever scheduled, released, cancelled, …, by whatever process, and how late releases were."""
        return await self._run(self._verbs.counters())

    async def loops(self) -> list[Loop]:
        """As :meth:`DelayQueue.loops <delayadapters.DelayQueue.loops>`."""
        return await self._run(self._verbs.loops())

    # ------------------------------------------------------------ a consumer of your own

    async def claim(self, limit: int = 100, *, lease: float = 30.0) -> list[Claim]:
        """Takes up to ``limit`` due jobs for ``lease`` seconds; see :meth:`~delayadapters.DelayQueue.claim`."""
        return await self._run(self._verbs.claim(limit, lease))

    async def ack(self, claims: Iterable[Claim]) -> int:
        """Forgets published jobs; answers how many were still ours."""
        return await self._run(self._verbs.settle(claims, "ack"))

    async def give_back(self, claims: Iterable[Claim]) -> int:
        """Returns claims unpublished, in their old place, no attempt counted; answers how many were ours."""
        return await self._run(self._verbs.settle(claims, "back"))

    async def fail(self, claims: Iterable[Claim], reason: str, *, retry_in: Delay | None) -> int:
        """Counts an attempt: retried in ``retry_in`` seconds or, with None, dead. Answers how many were ours."""
        return await self._run(self._verbs.fail(claims, reason, retry_in))

    async def renew(self, claims: Iterable[Claim], *, lease: float = 30.0) -> list[Claim]:
        """Extends leases to ``lease`` seconds from now; answers the claims still ours."""
        return await self._run(self._verbs.renew(claims, lease))


async def execute(client: Any, request: Call[Any] | Plain[Any], waiting: Waiting | None = None) -> Any:
    """Sends one request, once; raises redis-py's exceptions."""
    options = never_decode(client)
    if isinstance(request, Plain):
        if len(request.commands) == 1:
            return [await client.execute_command(*request.commands[0], **options)]
        pipe = client.pipeline(transaction=False)
        for command in request.commands:
            pipe.execute_command(*command, **options)
        return await pipe.execute(raise_on_error=not request.forgiving)
    tail = (len(request.keys), *request.keys, *request.args)
    if waiting is not None and request.script.name == "schedule":
        return await _execute_and_wait(client, request, waiting)
    try:
        return await client.execute_command("EVALSHA", request.script.sha, *tail, **options)
    except NoScriptError:
        return await client.execute_command("EVAL", request.script.text, *tail, **options)


async def _execute_and_wait(client: Any, request: Call[Any], waiting: Waiting) -> Any:
    """The script and the WAIT must go over one connection, so they are one pipeline."""
    options = never_decode(client)
    tail = (len(request.keys), *request.keys, *request.args)
    for head in (("EVALSHA", request.script.sha), ("EVAL", request.script.text)):
        pipe = client.pipeline(transaction=False)
        pipe.execute_command(*head, *tail, **options)
        pipe.execute_command(*waiting.command)
        reply, confirmed = await pipe.execute(raise_on_error=False)
        if isinstance(reply, NoScriptError) and head[0] == "EVALSHA":
            continue
        if isinstance(reply, Exception):
            raise reply
        waiting.judge(request.parse(reply), confirmed)
        return reply
    raise AssertionError("EVAL cannot answer NOSCRIPT")
