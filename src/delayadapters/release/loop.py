"""The decisions of a release loop: what to ask of Redis next, when to wake, when to back off. No I/O, no clock.

A shell (:mod:`.threads`, :mod:`.aio`) repeats: ask :meth:`ReleaseLoop.next` for an action, carry it out, report back.
Times handed in are the shell's own clock in seconds, one that runs on while the process is stopped or the machine
sleeps. Due times are the Redis server's; ``_offset`` translates, learnt from answers that carry the server's time.

One loop per shard watches: it sleeps until the head is due, looks once a poll, and holds a short watch lease in Redis.
The others sleep until that lease could lapse, and are called in by "help" when a claim leaves due work behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from typing import Any, Final, TypeAlias

from ..errors import LeaseLost
from ..jobs import BEAT, Claim
from ..redis import commands
from ..redis.commands import Asker, Call, Claimed, Peek, Plain, Probe, Verdict
from ..redis.keys import ShardKeys
from .observing import Late, Observers, lateness_of, to_count
from .publisher import DOWN, Batch, Published
from .settings import ReleaserStats, ReleaseSettings
from .telling import Telling, short

__all__ = ["Action", "Done", "Publish", "ReleaseLoop", "Send", "Sleep", "backoff"]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait until the shell's clock says ``until``, or a message comes. ``precise``: a job is due then."""

    until: float
    precise: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send this request; report with ``answered`` or ``fault``."""

    request: Call[Any] | Plain[Any]


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this batch, renewing meanwhile; report with ``published`` or ``publish_failed``."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is held any more."""


Action: TypeAlias = Sleep | Send | Publish | Done


_NOTES: Final = {
    "dead": "dead, set aside with its reason",
    "retry": "release failed, to be tried again",
    "dropped": "dropped, an entry without a record",
}


class ReleaseLoop:
    """The loop of one shard."""

    def __init__(
        self,
        keys: ShardKeys,
        asker: Asker,
        settings: ReleaseSettings,
        *,
        clock: Callable[[], float],
        server_now: Callable[[], int | None] = lambda: None,
        stats: ReleaserStats | None = None,
        observers: Observers | None = None,
        times: bool = True,
    ) -> None:
        """``times``: whether a plain TIME asks the shard's own server; in a cluster any node may answer it."""
        self._times = times
        self._keys = keys
        self._asker = asker
        self._set = settings
        self._clock = clock
        self._server_now = server_now
        self.stats = stats or ReleaserStats()
        self._observers = observers or Observers()
        self._tell = Telling(keys.due.decode(errors="replace")[1:-5], clock)
        self.heard_at = clock()
        """When Redis last answered, on the shell's clock; at first, when the loop was made."""
        self._lease = round(settings.lease * 1e6)
        # Other loops' leases have to be seen in time, short ones too.
        self._thorough_every = min(settings.thorough, max(settings.poll, settings.lease / 2))
        self._size = min(100, settings.batch)
        self._call = 0
        # What is known of Redis.
        self._offset: int | None = None
        self._offset_error = 0.0
        self._offset_at = 0.0
        self._head: int | None = None
        self._expires: int | None = None
        self._watching = False
        self._watch_until = 0.0
        self._look_at = 0.0
        self._thorough_at = 0.0
        self._helped_at = 0.0
        self._beat_at = 0.0
        self._timed_at = 0.0
        self.missed_wakes = 0
        """Heads found by looking that no message told of; the shell renews its subscription when they add up."""
        # What is in hand.
        self._pending: Call[Any] | Plain[Any] | None = None
        self._then: Callable[[Any, float, float], None] = self._ignore
        self._unsettled: Call[Any] | None = None
        self._batches: list[Sequence[Claim]] = []
        self._current: Sequence[Claim] = ()
        self._fence = 0
        self._leased_at = 0.0
        self._renewal_at = 0.0
        self._held_until = 0.0
        self._progress_at = 0.0
        self._hung = False
        self._acks: list[bytes] = []
        self._late: dict[str, int] = {}
        self._owes_acks = False
        self._verdicts: list[Verdict] = []
        # What drives it.
        self._urgent = True
        self._helping = False
        self._faults = 0
        self._retry_at = 0.0
        self._pauses = 0
        self._paused_until: float | None = None
        self._stood_down = True
        self._listed = False
        self._stopping = False

    # ------------------------------------------------------------ asked by the shell

    def next(self, now: float) -> Action:
        """What to do now. Answers Sleep, Send, Publish or Done."""
        if self._pending is None:
            self._decide(now)
        if self._pending is not None:
            if now < self._retry_at:
                return Sleep(self._retry_at)
            return Send(self._pending)
        if self._batches:
            self._current = self._batches.pop(0)
            self._progress_at, self._hung = now, False
            return Publish(Batch(self._current, self.holds))
        if self._stopping:
            self._tell.flush(force=True)
            return Done()
        return self._rest(now)

    def _decide(self, now: float) -> None:
        """Sets the next request, if one is called for."""
        if self._unsettled is not None:
            # A renewal whose answer is missing: which fence holds must be known before anything is settled.
            self._ask(self._unsettled, self.renewed)
        elif self._verdicts:
            verdicts, self._verdicts = self._verdicts, []
            self._ask(commands.settle(self._keys, self._fence, verdicts, self._server_now()), self._settled)
        elif self._batches:
            if self._stopping or self._paused_until is not None:
                self._give_back([claim for batch in self._batches for claim in batch])
                self._batches = []
                self._decide(now)
            elif not self.holds():
                # Stopped between claim and publish (SIGSTOP, a laptop's sleep): ask what is still ours.
                self._progress_at = now
                renewal = self.renewal(now)
                if renewal is not None:
                    self._ask(renewal, self.renewed)
        elif self._stopping or self._paused_until is not None:
            if self._acks:
                self._ask_claim(now, limit=0)
            elif not self._stood_down or (self._stopping and self._listed):
                request = commands.leave(self._keys, self._asker, ends=self._stopping, now=self._server_now())
                self._ask(request, self._left)
            elif self._paused_until is not None and now >= self._paused_until:
                self._paused_until = None
                self._urgent = True
                if not self._stopping:
                    self._decide(now)
        elif self._acks or self._urgent or self._work_at() <= now:
            self._ask_claim(now, limit=self._size)
        elif now >= self._look_at:
            if self._watching and now < self._watch_until:
                thorough = now >= self._thorough_at
                if thorough:
                    self._thorough_at = now + self._thorough_every
                if thorough and not (self._times and self._server_now() is None):
                    # TIME would mean nothing: the clock is injected, or another server's.
                    self._ask_claim(now, limit=self._size)
                    return
                watch_ms = round(self._set.watch * 1000)
                beat = self._server_clock(now) if thorough else None
                look = commands.peek(self._keys, self._asker, watch_ms=watch_ms, thorough=thorough, beat=beat)
                self._ask(look, self._peeked)
            elif self._watching:
                self._watching = False
                self._ask_claim(now, limit=self._size)
            else:
                self._probe(now)

    def _rest(self, now: float) -> Action:
        if self._paused_until is not None:
            return Sleep(self._paused_until)
        work = self._work_at()
        return Sleep(work, precise=True) if work < self._look_at else Sleep(self._look_at)

    def _work_at(self) -> float:
        """When there is something to claim, on the shell's clock."""
        if not (self._watching or self._helping) or self._offset is None:
            return float("inf")
        first = min((at for at in (self._head, self._expires) if at is not None), default=None)
        return float("inf") if first is None else (first - self._offset) / 1e6

    def holds(self) -> bool:
        """Whether the leases of the batch in hand still run, with a tenth to spare."""
        self._progress_at = self._clock()
        return self._progress_at < self._held_until

    # ------------------------------------------------------------ told by the shell

    def woken(self, message: bytes | str | None, now: float) -> None:
        """A message on the wake channel; None: the subscription is new, so messages may have been missed."""
        if message is None:
            self._look_at = min(self._look_at, now)
            return
        text = message.decode("ascii", "replace") if isinstance(message, bytes) else message
        kind, _, word = text.partition(" ")
        self.missed_wakes = 0
        if kind == "due" and word.isdigit():
            if self._watching and (self._head is None or int(word) < self._head):
                self._head = int(word)
        elif kind in ("help", "watch"):
            self._urgent = self._helping = True

    def answered(self, answer: Any, sent: float, now: float) -> None:
        """The parsed answer to the last Send, which left at ``sent``."""
        if self._faults:
            self._tell.say(INFO, "redis answers again", failed_requests=self._faults)
            self._faults = 0
            self._urgent = True
        self.heard_at = now
        self._pending, then = None, self._then
        then(answer, sent, now)

    def fault(self, error: BaseException, now: float) -> None:
        """The last Send failed. The same request is sent again, after a pause: repeated, it has the same effect."""
        self._faults += 1
        self.stats.faults += 1
        if self._faults == 1:
            self._tell.say(WARNING, "redis does not answer the release loop, it will ask again", error=short(error))
        self._watching = False
        self._retry_at = now + backoff(self._faults, self._set.fault_base, self._set.fault_cap)
        if self._stopping and self._faults > 3 and not (self._owes_acks and now < self._held_until):
            # Nothing can be given back: the leases will pass, and another loop takes over. What is published would then
            # go out again, so an ack is worth waiting for while the lease lasts.
            self._pending = self._unsettled = None
            self._batches, self._acks, self._verdicts = [], [], []
            self._owes_acks = self._listed = False
            self._stood_down = True

    def published(self, result: Published | None, now: float) -> None:
        """The batch of the last Publish is done."""
        result = result or Published()
        unpublished = frozenset(result.unpublished)
        returned = []
        dues = []
        for claim in self._current:
            if claim.entry in result.failed:
                self._fail(claim, result.failed[claim.entry])
            elif claim.entry in unpublished:
                returned.append(claim)
            else:
                self._acks.append(claim.entry)
                dues.append(claim.due)
        self._note_lateness(dues, now)
        self._give_back(returned)
        self._owes_acks = bool(self._acks)
        sent = len(self._current) - len(returned)
        self._current = ()
        if result.broker_down is not None:
            self._pause(result.broker_down, now)
        elif sent:
            if self._pauses:
                self._tell.say(INFO, "the broker takes messages again", pauses=self._pauses)
            self._pauses = 0
        elif returned:
            self._pause("the publisher returned everything unpublished", now)

    def publish_failed(self, error: BaseException, now: float) -> None:
        """Publish raised, so nothing of the batch counts as published."""
        claims, self._current = self._current, ()
        if isinstance(error, LeaseLost):
            # Not ours any more: whatever can be given back is refused where somebody else has it.
            self._give_back(claims)
        elif isinstance(error, DOWN):
            self._give_back(claims)
            self._pause(f"{type(error).__name__}: {error}", now)
        elif len(claims) > 1:
            self._tell.tally(
                WARNING, "the publisher raised, trying one by one", short(error), len(claims), error=short(error)
            )
            self._batches[:0] = [[claim] for claim in claims]
        elif claims:
            self._fail(claims[0], f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        """Finish or give back what is held, hand the watch over, then answer Done."""
        self._stopping = True

    # ------------------------------------------------------------ renewing, while a batch is being published

    @property
    def renew_at(self) -> float:
        """When to renew: a third into the lease. Not into the publish: a job tried alone may have waited for others."""
        return self._leased_at + self._set.lease / 3

    def renewal(self, now: float) -> Call[tuple[int, frozenset[bytes]]] | None:
        """The request that extends the leases in hand, the same one again until it is answered; None: let them pass.

        They pass when the publisher has made no progress for ``patience`` seconds: then it hangs, and another loop
        takes its jobs over. Asking the batch whether it is held counts as progress.
        """
        if now - self._progress_at > self._set.patience:
            if not self._hung:
                self._tell.say(
                    ERROR, "the publisher hangs, its jobs are left to others", seconds=round(now - self._progress_at)
                )
            self._hung = True
            return None
        if self._unsettled is None:
            claims = [claim.entry for claim in self._current]
            claims += [claim.entry for batch in self._batches for claim in batch]
            claims += self._acks
            if not claims:
                return None
            self._call += 1
            self._renewal_at = now
            self._unsettled = commands.renew(
                self._keys,
                self._asker,
                self._call,
                lease=self._lease,
                fence=self._fence,
                entries=claims,
                now=self._server_now(),
            )
        return self._unsettled

    def renewed(self, answer: tuple[int, frozenset[bytes]], sent: float, now: float) -> None:
        """The renewal was answered."""
        self._unsettled = None
        self.heard_at = now
        deadline, held = answer
        self._fence = deadline
        have = len(self._current) + sum(map(len, self._batches))
        whole = all(claim.entry in held for claim in self._current)
        kept = [[claim for claim in batch if claim.entry in held] for batch in self._batches]
        self._batches = [batch for batch in kept if batch]
        left = sum(claim.entry in held for claim in self._current) + sum(map(len, self._batches))
        if left < have:
            self._tell.tally(WARNING, "leases passed before they were renewed", "", have - left)
        # A repeated one is answered with the deadline that the first, whose answer was lost, was granted.
        self._leased_at = min(sent, self._renewal_at)
        self._held_until = self._leased_at + self._set.lease * 0.9 if whole else now

    # ------------------------------------------------------------ requests and their answers

    def _ask(self, request: Call[Any] | Plain[Any], then: Callable[[Any, float, float], None]) -> None:
        self._pending, self._then = request, then
        self._retry_at = 0.0

    def _ask_claim(self, now: float, *, limit: int) -> None:
        self._call += 1
        self._urgent = False
        renew_watch = not self._watching or self._watch_until - now < self._set.watch / 2
        help = limit > 0 and now - self._helped_at > 0.1
        if help:
            self._helped_at = now
        fence, acks = self._fence, self._acks
        late, self._late = self._late, {}
        request = commands.claim(
            self._keys,
            self._asker,
            self._call,
            lease=self._lease,
            limit=limit,
            watch_ms=round(self._set.watch * 1000) if limit and renew_watch else 0,
            help=help,
            retry_base=round(self._set.backoff * 1e6),
            retry_cap=round(self._set.backoff_cap * 1e6),
            max_attempts=self._set.max_attempts,
            fence=fence,
            acks=acks,
            late=late if acks else None,
            now=self._server_now(),
        )
        self._acks = []

        def then(answer: Claimed, sent: float, now: float) -> None:
            self._claimed(answer, len(acks), limit, sent, now)

        self._ask(request, then)

    def _claimed(self, got: Claimed, acks: int, limit: int, sent: float, now: float) -> None:
        stats = self.stats
        stats.claims += 1
        stats.released += got.acked
        stats.stale_acks += acks - got.acked
        stats.requeued += got.requeued
        stats.direct += got.direct
        stats.latest = max(stats.latest, got.latest / 1e6)
        if acks > got.acked:
            self._tell.tally(WARNING, "acks came too late, these jobs may be released twice", "", acks - got.acked)
        if got.requeued:
            self._tell.tally(INFO, "re-queued, their lease had passed", "", got.requeued)
        for id, what, reason in got.notes:
            self._tell.tally(WARNING, _NOTES.get(what, what), reason, id=id, reason=short(reason))
        self._tell.flush()
        for _, what, _ in got.notes:
            stats.dead += what == "dead"
            stats.dropped += what == "dropped"
            stats.failed += what != "dropped"
        self._learn_clock(got.now, sent, now, got.spent)
        # Loops that started together do not all tell of themselves in the same second.
        self._beat_at = now + BEAT * random.uniform(0.5, 1.0)
        self._timed_at = now + 5 * BEAT
        self._head, self._expires = got.head, got.expires
        if got.head is None or got.head > got.now:
            self._helping = False
        if got.watching is not None:
            self._set_watching(got.watching, got.watch_left, sent)
        self._listed = True
        if limit:
            self._stood_down = False
        self._owes_acks = False
        self._fence = got.lease
        # A repeated claim answers with the lease of the first: count back from its deadline.
        self._leased_at = sent + (got.lease - got.now) / 1e6 - self._set.lease if got.lease else sent
        self._held_until = self._leased_at + self._set.lease * 0.9
        if got.claims:
            self._batches.append(got.claims)
        for entry, reason in got.unreadable.items():
            self._tell.tally(WARNING, "unreadable, set aside as dead", reason, id=entry[6:], reason=short(reason))
            stats.dead += 1
            self._verdicts.append(Verdict(entry, "dead", 0, reason))
        count = len(got.claims) + got.direct
        self._observers.claimed(now - sent, count)
        if got.late:
            self._observers.released([Late(*one) for one in got.late])
        if got.spent and count >= self._size // 2:
            wanted = self._size * min(2.0, max(0.5, self._set.target / got.spent))
            self._size = stats.batch = max(1, min(self._set.batch, max(10, round(wanted))))

    def _server_clock(self, now: float) -> int | None:
        """The server's clock, as far as it is known."""
        injected = self._server_now()
        if injected is not None or self._offset is None:
            return injected
        return self._offset + round(now * 1e6)

    def _probe(self, now: float) -> None:
        # A sign of life costs a command: one with every tenth look, and a reading of the clock with every fiftieth.
        beat = self._server_clock(now) if now >= self._beat_at else None
        timed = beat is not None and now >= self._timed_at and self._times and self._server_now() is None
        if beat is not None:
            self._beat_at = now + BEAT
        if timed:
            self._timed_at = now + 5 * BEAT
        self._ask(commands.probe(self._keys, self._asker, beat=beat, timed=timed), self._probed)

    def _peeked(self, seen: Peek, sent: float, now: float) -> None:
        self.stats.peeks += 1
        if not seen.watching:
            # Stopped for longer than the watch lease: somebody else may have it.
            self._watching = False
            self._urgent = True
            return
        self._set_watching(True, 0, sent)
        if seen.now is not None:
            self._learn_clock(seen.now, sent, now, 0)
            self._expires = seen.expires
        if seen.head is not None and (self._head is None or seen.head < self._head):
            self.missed_wakes += 1
        self._head = seen.head

    def _probed(self, seen: Probe, sent: float, now: float) -> None:
        self.stats.peeks += 1
        if seen.now is not None:
            self._learn_clock(seen.now, sent, now, 0)
        if seen.left <= 0:
            self._urgent = True
        else:
            self._look_at = self._lapse(now, seen.left)

    def _lapse(self, seen: float, left: int) -> float:
        """When a watch with ``left`` milliseconds at ``seen`` could lapse; never further off than a watch is long."""
        return seen + min(left / 1000, self._set.watch) + self._set.slack

    def _set_watching(self, watching: bool, left: int, sent: float) -> None:
        if watching and not self._watching:
            self._thorough_at = sent + self._thorough_every
        self._watching = watching
        if watching:
            self._watch_until = sent + self._set.watch
            self._look_at = sent + self._set.poll
        else:
            self._look_at = self._lapse(sent, left)

    def _settled(self, count: int, sent: float, now: float) -> None:
        self._urgent = self._urgent or self._watching

    def _left(self, held: bool, sent: float, now: float) -> None:
        self._stood_down = True
        self._listed = self._listed and not self._stopping
        self._watching = self._helping = False

    @staticmethod
    def _ignore(answer: Any, sent: float, now: float) -> None:
        raise AssertionError("an answer without a request")

    def _learn_clock(self, server: int, sent: float, now: float, spent: int) -> None:
        """``server`` was read when a script that took ``spent`` microseconds began, between ``sent`` and ``now``."""
        trip = max(0.0, now - sent - spent / 1e6)
        offset = server - round((sent + trip / 2) * 1e6)
        stepped = self._offset is None or abs(offset - self._offset) > (trip + self._offset_error) * 5e5 + 500
        if stepped or trip <= self._offset_error * 1.1 or now - self._offset_at > 10:
            self._offset, self._offset_error, self._offset_at = offset, trip, now

    # ------------------------------------------------------------ outcomes

    def _fail(self, claim: Claim, reason: str) -> None:
        attempt = claim.attempts + 1
        self.stats.failed += 1
        if attempt >= self._set.max_attempts:
            self.stats.dead += 1
            self._tell.tally(WARNING, _NOTES["dead"], reason, id=claim.id, attempts=attempt, reason=short(reason))
            self._verdicts.append(Verdict(claim.entry, "dead", 0, reason))
            return
        pause = backoff(attempt, self._set.backoff, self._set.backoff_cap)
        self._verdicts.append(Verdict(claim.entry, "retry", round(pause * 1e6), reason))

    def _note_lateness(self, dues: Sequence[int], now: float) -> None:
        at = self._server_clock(now)
        if dues and at is not None:
            late = lateness_of(dues, at)
            self._late = to_count(late, self._late)
            self._observers.released(late)

    def _give_back(self, claims: Sequence[Claim]) -> None:
        self.stats.given_back += len(claims)
        self._verdicts += [Verdict(claim.entry, "back") for claim in claims]

    def _pause(self, reason: str, now: float) -> None:
        self._pauses += 1
        self.stats.pauses += 1
        if self._pauses == 1:
            self._tell.say(WARNING, "the broker takes no messages, release pauses", reason=short(reason))
        self._paused_until = now + backoff(self._pauses, self._set.pause_base, self._set.pause_cap)


def backoff(attempt: int, base: float, cap: float) -> float:
    """Seconds to pause after ``attempt`` failures: exponential with jitter, between half of it and all of it."""
    return float(min(cap, base * 2.0 ** min(attempt - 1, 60))) * random.uniform(0.5, 1.0)
