"""The delay queue over a redis-py client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError, RedisError

from ..due import Delay
from ..errors import DelayError, RedisFault, WrongKeyType
from ..jobs import Claim, Command, Counters, IfExists, Job, Loop, NewJob, Outcome, Page, Stats
from . import commands, steering
from .commands import Call, Plain
from .connect import Options, Waiting, check_wait, client_options, describe, never_decode, next_pause, try_seconds
from .faults import RETRIABLE, sent, translate
from .verbs import Steps, Verbs

__all__ = ["DelayQueue"]

T = TypeVar("T")


class DelayQueue:
    """A delay queue on Redis, for threads and plain scripts. Safe to share between threads.

    Args:
        client: a redis-py client: ``Redis``, ``Sentinel.master_for(…)`` or ``RedisCluster``; any ``decode_responses``,
            RESP2 or RESP3. It stays the caller's to close. Its own retries and time-outs apply.
        name: tells queues on one server apart; no braces.
        shards: more than one spreads the queue over several keys (Redis Cluster). Every user of the queue must agree.
        max_payload: bytes; None: no limit.
        wait_replicas, wait_aof, wait_timeout: ``schedule`` returns only when so many replicas (and, with ``wait_aof``,
            the server's own append-only file on disk; Redis ≥ 7.2) have it, or raises ReplicationTimeout after
            ``wait_timeout`` seconds.

    Every verb raises from one tree, :class:`~delayadapters.DelayError`; what it says is stored is stored.
    """

    def __init__(
        self,
        client: redis.Redis | Any,
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
    ) -> DelayQueue:
        """A queue with a client of its own (``redis://``, ``rediss://``, ``unix://``), closed with the queue.

        Args:
            timeout: seconds within which each round trip is answered or raises, retries included. A request is repeated
                while it fails to connect or to get an answer; repeating it never does it twice.
            options: any other argument of this class, or of redis-py's client.
        """
        own, rest = Options.split(options)
        settings = client_options(timeout, rest)
        check_wait(own, settings)
        client = redis.Redis.from_url(url, **settings)
        queue = cls(client, name=name, shards=shards, **own)
        queue._own(timeout)
        return queue

    def _own(self, timeout: float) -> None:
        """The client was made for this queue: closed with it; a request is repeated for up to ``timeout`` seconds."""
        self._owned, self._bound, self._try = True, timeout, try_seconds(timeout)

    # ------------------------------------------------------------ life

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._verbs.name

    @property
    def client(self) -> Any:
        """The redis-py client."""
        return self._client

    @property
    def _clock(self) -> Callable[[], int] | None:
        return self._verbs.clock

    @_clock.setter
    def _clock(self, clock: Callable[[], int] | None) -> None:
        self._verbs.clock = clock

    def close(self) -> None:
        """Closes the client if the queue made it (``from_url``). Waiting jobs stay in Redis."""
        if self._owned:
            self._client.close()

    def __enter__(self) -> DelayQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ the executor

    def _run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._send(request)
                except DelayError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            steps.close()

    def _send(self, request: Call[Any] | Plain[Any]) -> Any:
        """One request, repeated for as long as ``from_url`` was told (a caller's own client: once)."""
        deadline = None if self._bound is None else time.monotonic() + self._bound
        attempt, maybe_done = 0, False
        while True:
            try:
                return request.parse(execute(self._client, request, self._waiting))
            except RETRIABLE as error:
                maybe_done = maybe_done or sent(error) or self._bound is None
                attempt += 1
                pause = next_pause(attempt, error, deadline, self._try)
                if pause is None:
                    raise self._fault(error, request, maybe_done) from error
                time.sleep(pause)
            except RedisError as error:
                raise self._fault(error, request, maybe_done) from error

    def _fault(self, error: BaseException, request: Call[Any] | Plain[Any], maybe_done: bool) -> RedisFault:
        fault = translate(error, describe(request), [request.shard.due, request.shard.entries], maybe_done=maybe_done)
        if isinstance(fault, WrongKeyType):
            look = commands.types(request.shard)
            try:
                found = look.parse(execute(self._client, look))
            except RedisError:
                return fault
            return WrongKeyType(f"{fault}; found {commands.wrong_types(request.shard, found)}")
        return fault

    # ------------------------------------------------------------ verbs

    def schedule(
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
        """Stores a job, to be released at its due time and not a microsecond before, by the Redis server's clock.

        Once this returns, the job survives every process; what Redis itself may lose, its persistence settings say.

        Args:
            payload: opaque bytes.
            delay: seconds or timedelta, added to the server's clock; at: an aware datetime. Exactly one. A negative
                delay or a past time is due now.
            id: up to 512 bytes of UTF-8; default a new UUID. Not unique by nature: see ``if_exists``.
            meta: small readable strings shown to operators (task name, framework queue).
            if_exists: what to do when a live (waiting or leased) job has this id: ``"error"`` raises JobExists,
                ``"keep"`` answers that job (outcome KEPT), ``"replace"`` puts this one in its place (outcome REPLACED,
                or IN_FLIGHT when the old one is being released and may still go out once), ``"add"`` stores both.
            release: Redis commands that put the job into a broker on the same server; see :class:`NewJob`.

        Raises:
            TypeError, ValueError, PayloadTooLarge: a bad argument; nothing was stored.
            JobExists, RedisFault: nothing was stored, unless it is OutcomeUnknown.
            ReplicationTimeout: stored, but not yet as safely as asked.
        """
        return self._run(self._verbs.schedule(payload, delay, at, id, meta, if_exists, release))

    def schedule_many(self, items: Iterable[NewJob], *, if_exists: IfExists = "error") -> list[Job]:
        """Stores many jobs, up to 200 (or about 1 MiB) a round trip; answers them in the given order.

        All arguments are checked before anything is stored. Each round trip stores all of its jobs or none; with
        several, JobExists or a RedisFault can come after earlier ones were stored.
        """
        return self._run(self._verbs.schedule_many(items, if_exists))

    def cancel(self, id: str) -> Outcome:
        """Cancels a waiting job. CANCELLED is final: it will not be released.

        Otherwise IN_FLIGHT (being released now; further waiting entries of the id are cancelled all the same),
        RELEASED (recently), or NOT_FOUND.
        """
        return self._run(self._verbs.cancel(id))

    def reschedule(self, id: str, *, delay: Delay | None = None, at: datetime | None = None) -> Outcome:
        """Gives a waiting job a new due time: RESCHEDULED, or IN_FLIGHT, RELEASED, NOT_FOUND."""
        return self._run(self._verbs.reschedule(id, delay, at))

    def release_now(self, id: str) -> Outcome:
        """Makes a waiting job due now: RESCHEDULED, or IN_FLIGHT, RELEASED, NOT_FOUND."""
        return self._run(self._verbs.reschedule(id, 0, None))

    def cancel_many(self, ids: Iterable[str]) -> list[Outcome]:
        """:meth:`cancel` for each of ``ids``, 100 a round trip; outcomes in their order. Ids given twice count once."""
        return self._run(steering.steer_ids(self._verbs, "cancel", ids))

    def reschedule_many(
        self, ids: Iterable[str], *, delay: Delay | None = None, at: datetime | None = None
    ) -> list[Outcome]:
        """:meth:`reschedule` for each of ``ids``, 100 a round trip; outcomes in their order."""
        return self._run(steering.steer_ids(self._verbs, "reschedule", ids, delay, at))

    def get(self, id: str) -> Job | None:
        """The job with this id: its earliest waiting entry, else a leased one, else a dead one, else None."""
        return self._run(self._verbs.get(id))

    def jobs(self, *, due_before: datetime | None = None, limit: int = 100, cursor: str | None = None) -> Page:
        """A page of waiting jobs in due order (those to be retried: in order of their next try).

        Args:
            due_before: an aware datetime; only jobs due before it.
            limit: at most so many (1 to 10,000); fewer when their payloads pass about 1 MiB.
            cursor: of the page before. Jobs that come and go between pages move nobody else.
        """
        return self._run(self._verbs.page("due", due_before, limit, cursor))

    def dead_jobs(self, *, limit: int = 100, cursor: str | None = None) -> Page:
        """A page of dead jobs in order of death, each with its ``reason``."""
        return self._run(self._verbs.page("dead", None, limit, cursor))

    def replay(self, id: str) -> Outcome:
        """Makes a dead job wait again, due now, attempts from zero: REPLAYED or NOT_FOUND."""
        return self._run(self._verbs.revive(id, "replay"))

    def discard(self, id: str) -> Outcome:
        """Deletes a dead job: DISCARDED or NOT_FOUND."""
        return self._run(self._verbs.revive(id, "discard"))

    def purge(self) -> None:
        """Deletes the whole queue, dead jobs and leases included. What is being released now may still go out."""
        self._run(self._verbs.purge())

    def stats(self) -> Stats:
        """The queue in numbers; constant time however long the queue."""
        return self._run(self._verbs.stats())

    def counters(self) -> Counters:
        """What was ever scheduled, released, cancelled, …, by whatever process, and how late releases were."""
        return self._run(self._verbs.counters())

    def loops(self) -> list[Loop]:
        """The release loops that Redis has heard of and that did not stop, by shard, the most recent first.

        A loop that was killed stays in the list, ever longer unheard of, for a day or more: see :attr:`Loop.alive`.
        """
        return self._run(self._verbs.loops())

    # ------------------------------------------------------------ a consumer of your own

    def claim(self, limit: int = 100, *, lease: float = 30.0) -> list[Claim]:
        """Takes up to ``limit`` due jobs, in due order, for ``lease`` seconds; past it anybody may take them back.

        Jobs with a direct release are released by this very call and not returned.
        """
        return self._run(self._verbs.claim(limit, lease))

    def ack(self, claims: Iterable[Claim]) -> int:
        """Forgets published jobs; answers how many were still ours (a stale ack does nothing)."""
        return self._run(self._verbs.settle(claims, "ack"))

    def give_back(self, claims: Iterable[Claim]) -> int:
        """Returns claims unpublished, to their old place, no attempt counted; answers how many were still ours."""
        return self._run(self._verbs.settle(claims, "back"))

    def fail(self, claims: Iterable[Claim], reason: str, *, retry_in: Delay | None) -> int:
        """Counts an attempt: the jobs wait ``retry_in`` seconds or, with None, are dead. Answers how many were ours."""
        return self._run(self._verbs.fail(claims, reason, retry_in))

    def renew(self, claims: Iterable[Claim], *, lease: float = 30.0) -> list[Claim]:
        """Extends leases to ``lease`` seconds from now; answers the claims still ours, with their new deadline."""
        return self._run(self._verbs.renew(claims, lease))


def execute(client: Any, request: Call[Any] | Plain[Any], waiting: Waiting | None = None) -> Any:
    """Sends one request, once; raises redis-py's exceptions."""
    options = never_decode(client)
    if isinstance(request, Plain):
        if len(request.commands) == 1:
            return [client.execute_command(*request.commands[0], **options)]
        pipe = client.pipeline(transaction=False)
        for command in request.commands:
            pipe.execute_command(*command, **options)
        return pipe.execute(raise_on_error=not request.forgiving)
    tail = (len(request.keys), *request.keys, *request.args)
    if waiting is not None and request.script.name == "schedule":
        return _execute_and_wait(client, request, waiting)
    try:
        return client.execute_command("EVALSHA", request.script.sha, *tail, **options)
    except NoScriptError:
        return client.execute_command("EVAL", request.script.text, *tail, **options)


def _execute_and_wait(client: Any, request: Call[Any], waiting: Waiting) -> Any:
    """The script and the WAIT must go over one connection, so they are one pipeline."""
    options = never_decode(client)
    tail = (len(request.keys), *request.keys, *request.args)
    for head in (("EVALSHA", request.script.sha), ("EVAL", request.script.text)):
        pipe = client.pipeline(transaction=False)
        pipe.execute_command(*head, *tail, **options)
        pipe.execute_command(*waiting.command)
        reply, confirmed = pipe.execute(raise_on_error=False)
        if isinstance(reply, NoScriptError) and head[0] == "EVALSHA":
            continue
        if isinstance(reply, Exception):
            raise reply
        waiting.judge(request.parse(reply), confirmed)
        return reply
    raise AssertionError("EVAL cannot answer NOSCRIPT")
