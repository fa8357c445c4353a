"""What a release loop decides: driven by hand-made answers on a clock that stands still, without Redis and threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from delayadapters import Batch, Claim, LeaseLost, Published, ReleaserStats
from delayadapters.jobs import ALIVE
from delayadapters.redis.commands import Asker, Call, Claimed, Peek, Plain, Probe
from delayadapters.redis.keys import ShardKeys
from delayadapters.release.loop import Done, Publish, ReleaseLoop, Send, Sleep
from delayadapters.release.settings import ReleaseSettings

EPOCH = 1_900_000_000_000_000
"""What the server's clock says (microseconds) when the shell's says 0."""
HOUR = 3600.0
SET = ReleaseSettings()


class Asked:
    """A request of the loop's, readable."""

    def __init__(self, request: Call[Any] | Plain[Any]) -> None:
        self.request = request
        self.args: dict[str, str] = {}
        self.rest: list[bytes] = []
        if isinstance(request, Call):
            self.name = request.script.name
            count = len(request.script.arg_names)
            raw = dict(zip(request.script.arg_names, request.args, strict=False))
            self.verdicts = _verdicts(raw["verdicts"]) if "verdicts" in raw else []
            self.args = {key: value.decode("latin-1") for key, value in raw.items()}
            self.rest = request.args[count:]
        else:
            self.name = " ".join(str(command[0]) for command in request.commands)


def _verdicts(packed: bytes) -> list[tuple[bytes, str, int, str]]:
    flat = msgpack.unpackb(packed, raw=True)
    return [(flat[i], flat[i + 1].decode(), flat[i + 2], flat[i + 3].decode()) for i in range(0, len(flat), 4)]


def claim(id: str, *, attempts: int = 0) -> Claim:
    return Claim(b"\0\0\0\0\0\0" + id.encode(), 0, id, EPOCH, b"payload of " + id.encode(), attempts=attempts)


class Desk:
    """A loop, the shell's clock and the server's."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.epoch = EPOCH
        self.stats = ReleaserStats()
        self.injected: int | None = None
        self.loop = ReleaseLoop(
            ShardKeys.of("queue", 0),
            Asker(b"me"),
            ReleaseSettings(**settings),
            clock=lambda: self.now,
            server_now=lambda: self.injected,
            stats=self.stats,
        )

    def server(self, ahead: float = 0.0) -> int:
        """The server's clock, ``ahead`` seconds from now."""
        return self.epoch + round((self.now + ahead) * 1e6)

    def next(self) -> Any:
        return self.loop.next(self.now)

    def asks(self, name: str) -> Asked:
        action = self.next()
        assert isinstance(action, Send), f"wanted a {name}, got {action}"
        asked = Asked(action.request)
        assert asked.name == name
        return asked

    def sleeps(self) -> Sleep:
        action = self.next()
        assert isinstance(action, Sleep), action
        return action

    def publishes(self) -> Batch:
        action = self.next()
        assert isinstance(action, Publish), action
        return action.batch

    def is_done(self) -> bool:
        return isinstance(self.next(), Done)

    def answer(self, answer: Any, *, trip: float = 0.0) -> None:
        sent, self.now = self.now, self.now + trip
        self.loop.answered(answer, sent, self.now)

    def claims(
        self,
        jobs: Sequence[Claim] = (),
        *,
        head: float | None = None,
        expires: float | None = None,
        watching: bool = True,
        left: float = 0.0,
        trip: float = 0.0,
        **more: Any,
    ) -> Asked:
        """The loop asks for a claim, and gets this answer. ``head``, ``expires``, ``left``: seconds from now."""
        asked = self.asks("claim")
        lease = self.server(float(asked.args["length"]) / 1e6) if jobs else 0
        answer = Claimed(
            now=self.server(),
            head=None if head is None else self.server(head),
            expires=None if expires is None else self.server(expires),
            watching=watching if int(asked.args["watch_ms"]) else None,
            watch_left=round(left * 1000),
            lease=lease,
            acked=len(asked.rest),
            requeued=0,
            direct=0,
            latest=0,
            spent=0,
            notes=(),
            claims=[replace(job, lease=lease) for job in jobs],
            unreadable={},
        )
        self.answer(replace(answer, **more), trip=trip)
        return asked

    def sees(self, *, head: float | None = None, watching: bool = True, thorough: bool = False) -> Asked:
        """The idle watcher looks, and sees this."""
        asked = self.asks("GETEX ZRANGE TIME ZRANGE HSET" if thorough else "GETEX ZRANGE")
        at = None if head is None else self.server(head)
        self.answer(Peek(watching, at, self.server() if thorough else None))
        return asked

    def settles(self, count: int | None = None) -> list[tuple[bytes, str, int, str]]:
        asked = self.asks("settle")
        self.answer(len(asked.verdicts) if count is None else count)
        return asked.verdicts

    def leaves(self, held: bool = True) -> None:
        self.asks("leave")
        self.answer(held)

    def holding(self, *ids: str, **answer: Any) -> Batch:
        """The loop claims these and is about to publish them."""
        self.claims([claim(id) for id in ids], **answer)
        return self.publishes()

    def renews(self, held: Sequence[Claim], *, trip: float = 0.0) -> Asked:
        """The shell renews while it publishes; ``held`` are the claims still ours."""
        request = self.loop.renewal(self.now)
        assert request is not None
        asked, sent = Asked(request), self.now
        assert asked.name == "renew"
        self.now += trip
        deadline = self.server(float(asked.args["length"]) / 1e6)
        self.loop.renewed((deadline, frozenset(one.entry for one in held)), sent, self.now)
        return asked


def seconds(until: float) -> Any:
    return pytest.approx(until, abs=2e-6)


# --------------------------------------------------------------------------------------------------- sleeping, waking


def test_it_begins_with_a_claim_that_asks_for_the_watch():
    asked = Desk().asks("claim")
    assert int(asked.args["watch_ms"]) == round(SET.watch * 1000)
    assert asked.args["limit"] == "100"
    assert asked.rest == []


def test_the_watcher_sleeps_exactly_until_the_head_is_due():
    desk = Desk()
    desk.claims(head=0.25)
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.25), precise=True)
    desk.now += 0.25 + 1e-6
    desk.asks("claim")


def test_nothing_due_soon_is_a_sleep_until_the_safety_poll():
    desk = Desk()
    desk.claims(head=HOUR)
    assert desk.sleeps() == Sleep(seconds(desk.now + SET.poll), precise=False)
    desk.now += SET.poll
    desk.sees(head=HOUR - 1)
    assert desk.sleeps() == Sleep(seconds(desk.now + SET.poll), precise=False)


def test_an_empty_queue_is_a_sleep_until_the_safety_poll():
    desk = Desk()
    desk.claims()
    assert desk.sleeps() == Sleep(seconds(desk.now + SET.poll))


def test_half_the_round_trip_counts_for_the_offset():
    desk = Desk()
    start = desk.server()
    desk.claims(head=0.5, trip=0.02)  # the server's clock was read as the request left; the loop supposes midway
    wake = desk.sleeps().until
    assert wake == seconds((start + 500_000 - EPOCH) / 1e6 + 0.01)


def test_a_script_that_took_long_is_not_taken_for_a_slow_network():
    desk = Desk()
    start = desk.server()
    desk.claims(head=0.5, trip=0.02, spent=20_000)
    assert desk.sleeps().until == seconds((start + 500_000 - EPOCH) / 1e6)


def test_an_earlier_head_is_slept_for():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.loop.woken(b"due %d" % desk.server(0.05), desk.now)
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.05), precise=True)


def test_a_head_due_already_is_claimed_at_once():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.loop.woken(b"due %d" % desk.server(-1), desk.now)
    desk.asks("claim")


@pytest.mark.parametrize("message", [b"due 99999999999999999", b"due x", b"due", b"", b"\xff\xfe", b"hello you"])
def test_later_heads_and_foreign_messages_change_nothing(message):
    desk = Desk()
    desk.claims(head=0.5)
    before = desk.sleeps()
    desk.loop.woken(message, desk.now)
    assert desk.sleeps() == before


def test_messages_as_text_are_understood():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.loop.woken(f"due {desk.server(0.05)}", desk.now)
    assert desk.sleeps().precise


def test_a_new_subscription_means_looking_at_once():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.loop.woken(None, desk.now)
    desk.sees(head=0.1)
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.1), precise=True)


def test_heads_found_by_looking_are_counted_as_missed_messages():
    desk = Desk()
    desk.claims(head=HOUR)
    for number, head in enumerate((1800.0, 900.0, 450.0), 1):
        desk.now = desk.sleeps().until
        desk.sees(head=head)
        assert desk.loop.missed_wakes == number
    desk.loop.woken(b"due %d" % desk.server(300), desk.now)
    assert desk.loop.missed_wakes == 0


def test_a_known_head_that_comes_nearer_is_no_missed_message():
    desk = Desk()
    desk.claims(head=HOUR)
    due = desk.server(HOUR)
    for _ in range(3):
        desk.now = desk.sleeps().until
        desk.sees(head=(due - desk.server()) / 1e6)
    assert desk.loop.missed_wakes == 0


def test_a_job_that_left_is_noticed_by_looking():
    desk = Desk()
    desk.claims(head=1.5)
    desk.now += 1.0
    desk.sees(head=None)
    assert desk.sleeps() == Sleep(seconds(desk.now + SET.poll))


def test_a_lease_to_expire_is_slept_for_as_well():
    desk = Desk()
    desk.claims(head=HOUR, expires=0.4)
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.4), precise=True)
    desk.now += 0.4 + 1e-6
    desk.asks("claim")


def test_the_watcher_looks_at_leases_and_the_clock_every_few_looks_only():
    desk = Desk()
    desk.claims()
    names = []
    for _ in range(10):
        desk.now = desk.sleeps().until
        action = desk.next()
        names.append(Asked(action.request).name)
        thorough = "TIME" in names[-1]
        desk.answer(Peek(True, None, desk.server() if thorough else None))
    assert sum("TIME" in name for name in names) == 2


@pytest.mark.parametrize(("lease", "looks"), [(30.0, 5), (4.0, 3), (0.5, 1)])
def test_short_leases_of_others_are_looked_at_in_time(lease, looks):
    """A lease that passes between two looks would otherwise wait for the next, however short it was."""
    desk = Desk(lease=lease)
    desk.claims(head=HOUR)
    thorough, number = False, 0
    while not thorough:
        number += 1
        desk.now = desk.sleeps().until
        thorough = Asked(desk.next().request).name == "GETEX ZRANGE TIME ZRANGE HSET"
        desk.sees(head=HOUR, thorough=thorough)
    assert number == looks


def test_a_lease_seen_by_looking_is_slept_for():
    desk = Desk(thorough=1.0)
    desk.claims()
    desk.now += 1.0
    desk.asks("GETEX ZRANGE TIME ZRANGE HSET")
    desk.answer(Peek(True, None, desk.server(), desk.server(0.3)))
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.3), precise=True)


# -------------------------------------------------------------------------------------------------- the server's clock


def test_a_clock_set_forward_is_learnt_by_looking():
    desk = Desk(thorough=1.0)
    desk.claims(head=HOUR)
    due = desk.server(HOUR)
    desk.epoch += 3_599_000_000
    desk.now += 1.0
    desk.asks("GETEX ZRANGE TIME ZRANGE HSET")
    desk.answer(Peek(True, due, desk.server()))
    desk.asks("claim")  # 3599 + 1 seconds later, it is due


def test_a_clock_set_back_is_learnt_from_the_claim_that_came_too_early():
    desk = Desk()
    desk.claims(head=0.5)
    due = desk.server(0.5)
    desk.epoch -= 10_000_000
    desk.now += 0.51
    desk.claims(head=(due - desk.server()) / 1e6)
    assert desk.loop._work_at() == seconds(desk.now + 10 - 0.01)


def test_a_slow_answer_does_not_spoil_a_good_offset():
    desk = Desk()
    desk.claims(head=10.0, trip=0.001)
    before = desk.loop._work_at()
    due = desk.server(10.0)
    desk.loop.woken(b"help", desk.now)
    desk.asks("claim")
    sent = desk.now
    desk.now += 0.8
    late = Claimed(desk.server() - 100_000, due, None, None, 0, 0, 0, 0, 0, 0, 0, (), (), {})
    desk.loop.answered(late, sent, desk.now)
    assert desk.loop._offset_error < 0.01
    assert abs(desk.loop._work_at() - before) < 0.01


def test_an_old_offset_is_replaced_even_by_a_worse_one():
    desk = Desk()
    desk.claims(trip=0.001)
    desk.now += 11
    desk.claims(trip=0.1)
    assert desk.loop._offset_error == pytest.approx(0.1)


def test_the_offset_is_good_again_after_a_slow_first_answer():
    desk = Desk()
    desk.claims(head=HOUR, trip=3.0)
    desk.now += 0.5
    desk.loop.woken(b"help", desk.now)
    desk.claims(head=0.5, trip=0.0)
    assert desk.loop._work_at() == seconds(desk.now + 0.5)


def test_with_an_injected_clock_the_watcher_looks_with_a_claim():
    desk = Desk(thorough=1.0)
    desk.injected = EPOCH
    desk.claims()
    desk.now += 1.0
    assert desk.asks("claim").args["now"] == str(EPOCH)


def test_in_a_cluster_the_clock_is_read_by_claims_alone():
    """A plain TIME is answered by whatever node the client likes, and their clocks differ."""
    desk = Desk(thorough=1.0)
    desk.loop._times = False
    desk.claims()
    desk.now += 1.0
    desk.asks("claim")


# --------------------------------------------------------------------------------------------- publishing and acking


def test_due_jobs_are_published_then_acked_by_the_next_claim():
    desk = Desk()
    batch = desk.holding("a", "b", head=HOUR)
    assert [one.id for one in batch] == ["a", "b"]
    fence = batch[0].lease
    desk.loop.published(None, desk.now)
    asked = desk.claims(head=HOUR)
    assert asked.rest == [one.entry for one in batch]
    assert asked.args["fence"] == str(fence)
    assert desk.stats.released == 2
    assert desk.sleeps() == Sleep(seconds(desk.now + SET.poll))


def test_a_claim_that_leaves_due_work_behind_calls_for_help_but_not_each_time():
    desk = Desk()
    assert desk.claims([claim("a")], head=-1).args["help"] == "1"
    desk.publishes()
    desk.loop.published(None, desk.now)
    assert desk.claims([claim("b")], head=-1).args["help"] == "0"
    desk.now += 0.2
    desk.publishes()
    desk.loop.published(None, desk.now)
    assert desk.asks("claim").args["help"] == "1"


def test_acks_that_came_too_late_are_counted():
    desk = Desk()
    desk.holding("a", "b", "c")
    desk.loop.published(None, desk.now)
    desk.claims(acked=1)
    assert (desk.stats.released, desk.stats.stale_acks) == (1, 2)


def test_what_a_publisher_names_is_settled_and_the_rest_acked():
    desk = Desk()
    batch = desk.holding("good", "bad", "unsent")
    good, bad, unsent = (one.entry for one in batch)
    desk.loop.published(Published(failed={bad: "too big"}, unpublished=[unsent]), desk.now)
    verdicts = {entry: (verb, reason) for entry, verb, _, reason in desk.settles()}
    assert verdicts == {bad: ("retry", "too big"), unsent: ("back", "")}
    assert desk.claims().rest == [good]
    assert (desk.stats.failed, desk.stats.given_back, desk.stats.released) == (1, 1, 1)


def test_settling_quotes_the_fence_of_the_batch():
    desk = Desk()
    batch = desk.holding("a")
    desk.loop.published(Published(failed={batch[0].entry: "no"}), desk.now)
    assert desk.asks("settle").args["fence"] == str(batch[0].lease)


@pytest.mark.parametrize("attempts", [0, 1, 2, 3])
def test_retries_back_off_with_jitter(attempts):
    pauses = set()
    for _ in range(20):
        desk = Desk(backoff=1.0)
        desk.claims([claim("a", attempts=attempts)])
        batch = desk.publishes()
        desk.loop.published(Published(failed={batch[0].entry: "no"}), desk.now)
        ((_, verb, pause, _),) = desk.settles()
        assert verb == "retry"
        pauses.add(pause)
    top = 1_000_000 * 2**attempts
    assert all(top // 2 <= pause <= top for pause in pauses)
    assert len(pauses) > 10


def test_the_backoff_has_a_cap():
    desk = Desk(backoff=1.0, backoff_cap=5.0, max_attempts=1000)
    desk.claims([claim("a", attempts=900)])
    batch = desk.publishes()
    desk.loop.published(Published(failed={batch[0].entry: "no"}), desk.now)
    assert desk.settles()[0][2] <= 5_000_000


def test_the_last_attempt_makes_it_dead_with_its_reason():
    desk = Desk(max_attempts=3)
    desk.claims([claim("a", attempts=2)])
    batch = desk.publishes()
    desk.loop.published(Published(failed={batch[0].entry: "malformed"}), desk.now)
    assert desk.settles() == [(batch[0].entry, "dead", 0, "malformed")]
    assert desk.stats.dead == 1


def test_an_unreadable_record_is_set_aside_and_the_others_published():
    desk = Desk()
    desk.claims([claim("a")], unreadable={b"\0\0\0\0\0\0bad": "unreadable record"})
    assert desk.settles() == [(b"\0\0\0\0\0\0bad", "dead", 0, "unreadable record")]
    assert [one.id for one in desk.publishes()] == ["a"]


def test_notes_of_the_script_are_counted():
    desk = Desk()
    notes = [("a", "dropped", "no record"), ("b", "dead", "unreadable record"), ("c", "retry", "WRONGTYPE")]
    desk.claims(notes=notes, requeued=4, direct=5, latest=20_000)
    stats = desk.stats
    assert (stats.dropped, stats.dead, stats.failed, stats.requeued, stats.direct) == (1, 1, 2, 4, 5)
    assert stats.latest == pytest.approx(0.02)


# ------------------------------------------------------------------------------------------------------- bad batches


def test_after_a_batch_that_raised_each_job_is_tried_alone():
    desk = Desk()
    desk.holding("a", "bad", "c")
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    for id in ("a", "bad", "c"):
        batch = desk.publishes()
        assert [one.id for one in batch] == [id]
        if id == "bad":
            desk.loop.publish_failed(ValueError("boom"), desk.now)
            ((entry, verb, _, reason),) = desk.settles()
            assert (entry[6:], verb, reason) == (b"bad", "retry", "ValueError: boom")
        else:
            desk.loop.published(None, desk.now)
    assert [entry[6:] for entry in desk.claims().rest] == [b"a", b"c"]
    assert desk.stats.failed == 1


def test_jobs_that_wait_to_be_tried_alone_are_renewed_with_the_one_that_is():
    desk = Desk(lease=30.0)
    desk.holding("a", "b", "c")
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    desk.publishes()
    desk.loop.published(None, desk.now)
    desk.publishes()
    asked = Asked(desk.loop.renewal(desk.now))
    assert sorted(entry[6:] for entry in asked.rest) == [b"a", b"b", b"c"]  # a: its ack is still to come


def test_a_job_tried_alone_is_renewed_by_the_age_of_its_lease_not_of_its_publish():
    desk = Desk(lease=30.0)
    claimed = desk.now
    batch = desk.holding("a", "b")
    assert desk.loop.renew_at == seconds(claimed + 10)
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    desk.publishes()
    desk.now += 9
    desk.loop.published(None, desk.now)
    desk.publishes()
    assert desk.loop.renew_at == seconds(claimed + 10)
    desk.now += 1
    desk.renews(batch)
    assert desk.loop.renew_at == seconds(desk.now + 10)


def test_a_lost_lease_charges_nobody():
    desk = Desk()
    desk.holding("a", "b")
    desk.loop.publish_failed(LeaseLost("gone"), desk.now)
    assert [verdict[1] for verdict in desk.settles(count=0)] == ["back", "back"]
    assert desk.stats.failed == 0


# --------------------------------------------------------------------------------------------------- the broker is down


def test_a_broker_that_is_down_gives_everything_back_hands_over_the_watch_and_pauses():
    desk = Desk()
    batch = desk.holding("a", "b")
    desk.loop.published(Published(unpublished=[one.entry for one in batch], broker_down="connection refused"), desk.now)
    assert [verdict[1] for verdict in desk.settles()] == ["back", "back"]
    desk.leaves()
    pause = desk.sleeps().until - desk.now
    assert 0.1 <= pause <= 0.2
    desk.now += pause
    assert int(desk.asks("claim").args["watch_ms"]) > 0
    assert (desk.stats.pauses, desk.stats.failed, desk.stats.given_back) == (1, 0, 2)


@pytest.mark.parametrize("error", [ConnectionRefusedError("no"), TimeoutError("slow"), OSError(5, "I/O error")])
def test_an_oserror_means_that_the_broker_is_down(error):
    desk = Desk()
    desk.holding("a", "b")
    desk.loop.publish_failed(error, desk.now)
    assert [verdict[1] for verdict in desk.settles()] == ["back", "back"]
    desk.leaves()
    assert isinstance(desk.next(), Sleep)
    assert desk.stats.failed == 0


def test_a_publisher_that_returns_everything_is_not_asked_again_at_full_speed():
    """Whatever its reason: claim and give back in turn would keep Redis busy for nothing."""
    desk = Desk()
    batch = desk.holding("a", "b")
    desk.loop.published(Published(unpublished=[one.entry for one in batch]), desk.now)
    assert [verb for _, verb, _, _ in desk.settles()] == ["back", "back"]
    desk.leaves()
    assert desk.sleeps().until > desk.now


def test_what_was_published_before_the_broker_went_down_is_acked_during_the_pause():
    desk = Desk()
    batch = desk.holding("a", "b")
    desk.loop.published(Published(unpublished=[batch[1].entry], broker_down="gone"), desk.now)
    desk.settles()
    asked = desk.claims()
    assert asked.args["limit"] == "0"
    assert asked.args["watch_ms"] == "0"
    assert asked.rest == [batch[0].entry]
    desk.leaves()
    desk.sleeps()


def test_jobs_not_yet_tried_alone_are_given_back_when_the_broker_goes_down():
    desk = Desk()
    desk.holding("a", "b", "c")
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    desk.publishes()
    desk.loop.publish_failed(ConnectionError("gone"), desk.now)
    given_back = [desk.settles(), desk.settles()]
    assert sorted(entry[6:] for verdicts in given_back for entry, *_ in verdicts) == [b"a", b"b", b"c"]
    desk.leaves()


def test_pauses_grow_and_one_success_ends_that():
    desk = Desk()
    pauses = []
    for _ in range(12):
        desk.holding("a")
        desk.loop.publish_failed(ConnectionError("gone"), desk.now)
        desk.settles()
        desk.leaves()
        pauses.append(desk.sleeps().until - desk.now)
        desk.now = desk.sleeps().until
    assert all(min(15.0, 0.2 * 2**n) / 2 <= pause <= min(15.0, 0.2 * 2**n) for n, pause in enumerate(pauses))
    desk.holding("a")
    desk.loop.published(None, desk.now)
    desk.claims([claim("a")])
    desk.publishes()
    desk.loop.publish_failed(ConnectionError("gone"), desk.now)
    desk.settles()
    desk.leaves()
    assert desk.sleeps().until - desk.now <= 0.2


def test_during_a_pause_messages_wake_nothing():
    desk = Desk()
    desk.holding("a")
    desk.loop.publish_failed(ConnectionError("gone"), desk.now)
    desk.settles()
    desk.leaves()
    until = desk.sleeps().until
    for message in (b"help", b"watch", b"due %d" % desk.server(-5), None):
        desk.loop.woken(message, desk.now)
        assert desk.sleeps().until == until


# ------------------------------------------------------------------------------------------------------------- leases


def test_a_renewal_is_the_same_request_until_it_is_answered():
    desk = Desk()
    desk.holding("a")
    first = desk.loop.renewal(desk.now)
    desk.now += 5
    assert desk.loop.renewal(desk.now) is first
    desk.loop.renewed((desk.server(30), frozenset([claim("a").entry])), desk.now, desk.now)
    second = desk.loop.renewal(desk.now)
    assert second is not first
    assert Asked(second).args["call"] != Asked(first).args["call"]


def test_a_repeated_renewal_prolongs_from_when_it_was_first_made():
    """Its answer is the first one's, which was lost."""
    desk = Desk(lease=30.0)
    batch = desk.holding("a")
    desk.now += 10
    granted = desk.server(30)
    assert desk.loop.renewal(desk.now) is not None
    desk.now += 22
    assert desk.loop.renewal(desk.now) is not None
    desk.loop.renewed((granted, frozenset([claim("a").entry])), desk.now, desk.now)
    batch.ensure_held()
    assert desk.loop.renew_at <= desk.now
    desk.now += 5.1  # 27.1 s after it was made first; a tenth is kept to spare
    assert not batch.held()


def test_after_a_renewal_the_new_fence_is_quoted():
    desk = Desk()
    batch = desk.holding("a", "b")
    desk.now += 10
    asked = desk.renews(batch)
    assert asked.args["fence"] == str(batch[0].lease)
    fence = desk.server(30)
    desk.loop.published(Published(failed={batch[0].entry: "no"}), desk.now)
    settle = desk.asks("settle")
    desk.answer(1)
    assert settle.args["fence"] == str(fence)
    assert desk.asks("claim").args["fence"] == str(fence)


def test_an_unanswered_renewal_is_resolved_before_anything_is_settled():
    desk = Desk()
    batch = desk.holding("a", "b")
    pending = desk.loop.renewal(desk.now)
    desk.loop.published(Published(failed={batch[0].entry: "no"}), desk.now)
    action = desk.next()
    assert action == Send(pending)
    deadline = desk.server(31)
    desk.answer((deadline, frozenset(one.entry for one in batch)))
    settle = desk.asks("settle")
    assert settle.args["fence"] == str(deadline)
    desk.answer(1)
    assert desk.asks("claim").args["fence"] == str(deadline)


def test_a_batch_knows_whether_it_is_held():
    desk = Desk(lease=10.0)
    batch = desk.holding("a", trip=1.0)
    desk.now += 7.9
    batch.ensure_held()
    desk.now += 0.2  # 9.1 s after the request left: a tenth is kept to spare
    assert not batch.held()
    with pytest.raises(LeaseLost):
        batch.ensure_held()


def test_a_renewal_prolongs_and_one_that_came_too_late_does_not():
    desk = Desk(lease=10.0)
    batch = desk.holding("a", "b")
    desk.now += 5
    desk.renews(batch)
    desk.now += 8
    assert batch.held()
    desk.renews([batch[0]])
    assert not batch.held()


def test_a_publisher_without_progress_hangs_and_is_renewed_no_more():
    desk = Desk(lease=10.0, patience=60.0)
    batch = desk.holding("a")
    for _ in range(12):
        desk.now += 5
        desk.renews(batch)
    desk.now += 1
    assert desk.loop.renewal(desk.now) is None
    assert desk.loop.renewal(desk.now + 5) is None


def test_asking_whether_the_batch_is_held_is_progress():
    desk = Desk(lease=10.0, patience=20.0)
    batch = desk.holding("a")
    for _ in range(20):
        desk.now += 8
        desk.renews(batch)
        assert batch.held()


def test_each_publish_begins_with_full_patience():
    desk = Desk(lease=100.0, patience=20.0)
    desk.holding("a", "b")
    desk.now += 15
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    batch = desk.publishes()
    desk.now += 15
    assert desk.loop.renewal(desk.now) is not None
    assert len(batch) == 1


def test_a_process_stopped_between_claim_and_publish_asks_what_is_still_its_own():
    desk = Desk(lease=10.0)
    desk.claims([claim("a"), claim("b"), claim("c")])
    desk.now += 60  # SIGSTOP, SIGCONT
    asked = desk.asks("renew")
    desk.answer((desk.server(10), frozenset([claim("b").entry])))
    assert [entry[6:] for entry in asked.rest] == [b"a", b"b", b"c"]
    batch = desk.publishes()
    assert [one.id for one in batch] == ["b"]
    assert batch.held()


def test_a_stopped_process_that_lost_everything_publishes_nothing():
    desk = Desk(lease=10.0)
    desk.claims([claim("a"), claim("b")])
    desk.now += 60
    desk.asks("renew")
    desk.answer((1, frozenset()))
    assert not isinstance(desk.next(), Publish)


# --------------------------------------------------------------------------------------------------------- Redis faults


def test_after_a_fault_the_same_request_is_sent_again_later():
    desk = Desk()
    first = desk.asks("claim").request
    desk.loop.fault(ConnectionError("gone"), desk.now)
    pause = desk.sleeps().until - desk.now
    assert 0.02 <= pause <= 0.05
    desk.now += pause
    assert desk.asks("claim").request is first


def test_pauses_after_faults_grow_to_a_cap_and_success_resets_them():
    desk = Desk()
    desk.asks("claim")
    for number in range(20):
        desk.loop.fault(ConnectionError("gone"), desk.now)
        pause = desk.sleeps().until - desk.now
        assert min(2.0, 0.05 * 2**number) / 2 <= pause <= min(2.0, 0.05 * 2**number)
        desk.now += pause
    desk.claims()
    assert desk.stats.faults == 20
    desk.asks("claim")  # whatever was missed
    desk.loop.fault(ConnectionError("gone"), desk.now)
    assert desk.sleeps().until - desk.now <= 0.05


def test_acks_survive_a_fault():
    desk = Desk()
    batch = desk.holding("a")
    desk.loop.published(None, desk.now)
    first = desk.asks("claim")
    desk.loop.fault(ConnectionError("gone"), desk.now)
    desk.now += 1
    again = desk.claims()
    assert again.rest == first.rest == [batch[0].entry]
    assert desk.stats.released == 1


def test_after_a_fault_the_watch_is_asked_for_anew():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.now += 1
    desk.asks("GETEX ZRANGE")
    desk.loop.fault(ConnectionError("gone"), desk.now)
    desk.now += 1
    desk.asks("GETEX ZRANGE")
    desk.answer(Peek(False, desk.server(HOUR)))
    assert int(desk.asks("claim").args["watch_ms"]) > 0


# -------------------------------------------------------------------------------------------------- who does not watch


def test_who_does_not_watch_sleeps_until_the_watch_could_lapse():
    desk = Desk()
    desk.claims(watching=False, left=1.5, head=0.2)
    assert desk.sleeps() == Sleep(seconds(desk.now + 1.5 + SET.slack))
    desk.now += 1.5 + SET.slack
    desk.asks("PTTL")
    desk.answer(Probe(900))
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.9 + SET.slack))
    desk.now += 0.9 + SET.slack
    desk.asks("PTTL")
    desk.answer(Probe(0))
    desk.claims(watching=True, head=0.2)
    assert desk.sleeps() == Sleep(seconds(desk.now + 0.2), precise=True)


def test_who_does_not_watch_says_that_it_lives_within_its_budget():
    desk = Desk()
    desk.claims(watching=False, left=1.5)
    began, beats, commands = desk.now, [desk.now], 0
    while desk.now < began + 400:
        desk.now = desk.sleeps().until
        request = desk.next().request
        words = [command[0] for command in request.commands]
        assert words[0] == "PTTL"
        assert set(words[1:]) <= {"TIME", "HSET"}
        commands += len(words)
        if "HSET" in words:
            beats.append(desk.now)
            assert request.commands[-1][3] == pytest.approx(desk.server(), abs=2)
        # The watcher renews every 0.95 s; a look comes just after.
        desk.answer(Probe(round((SET.poll * 2 - SET.slack) * 1000), desk.server() if "TIME" in words else None))
    assert max(b - a for a, b in itertools.pairwise(beats)) < ALIVE / 2
    assert commands / (desk.now - began) <= 0.6


def test_a_clock_that_was_set_is_learnt_by_who_does_not_watch():
    desk = Desk()
    desk.claims(watching=False, left=1.5)
    desk.epoch += 3_600_000_000
    seen = []
    for _ in range(120):
        desk.now = desk.sleeps().until
        request = desk.next().request
        words = [command[0] for command in request.commands]
        if "HSET" in words:
            seen.append(request.commands[-1][3] - desk.server())
        desk.answer(Probe(1750, desk.server() if "TIME" in words else None))
    assert abs(seen[0]) > 3_000_000_000
    assert abs(seen[-1]) < 1000


def test_a_loop_that_pauses_stays_in_the_list_and_one_that_stops_does_not():
    desk = Desk()
    desk.holding("a")
    desk.loop.published(Published(unpublished=[claim("a").entry], broker_down="down"), desk.now)
    desk.settles()
    assert desk.asks("leave").args["ends"] == "0"
    desk.answer(True)
    desk.loop.stop()
    assert desk.asks("leave").args["ends"] == "1"
    desk.answer(False)
    assert desk.is_done()


def test_new_heads_do_not_concern_who_does_not_watch():
    desk = Desk()
    desk.claims(watching=False, left=1.5)
    before = desk.sleeps()
    desk.loop.woken(b"due %d" % desk.server(0.01), desk.now)
    assert desk.sleeps() == before


def test_a_watch_handed_over_is_taken_at_once():
    desk = Desk()
    desk.claims(watching=False, left=1.5)
    desk.loop.woken(b"watch", desk.now)
    assert int(desk.asks("claim").args["watch_ms"]) > 0


def test_help_is_given_until_no_due_work_is_left():
    desk = Desk()
    desk.claims(watching=False, left=1.9)
    desk.loop.woken(b"help", desk.now)
    for _ in range(3):
        desk.holding("a", watching=False, left=1.5, head=-1)
        desk.loop.published(None, desk.now)
    desk.claims(watching=False, left=1.5, head=0.2)
    assert desk.sleeps() == Sleep(seconds(desk.now + 1.5 + SET.slack))


def test_a_watcher_that_finds_the_watch_taken_claims_once_and_stands_by():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.now += 1
    desk.sees(head=HOUR, watching=False)
    desk.claims(watching=False, left=1.0, head=0.1)
    assert desk.sleeps() == Sleep(seconds(desk.now + 1.0 + SET.slack))


def test_a_watcher_that_overslept_its_watch_claims_before_it_looks():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.now += 60  # SIGSTOP, SIGCONT
    assert int(desk.claims(watching=False, left=1.0).args["watch_ms"]) > 0
    assert desk.sleeps() == Sleep(seconds(desk.now + 1.0 + SET.slack))


def test_a_busy_watcher_renews_its_watch_with_its_claims():
    desk = Desk()
    desk.claims([claim("a")], head=-1)
    asked_for = []
    for _ in range(40):
        desk.now += 0.1
        desk.publishes()
        desk.loop.published(None, desk.now)
        asked_for.append(int(desk.claims([claim("a")], head=-1).args["watch_ms"]))
    assert 2 <= sum(ms > 0 for ms in asked_for) <= 8
    gaps = "".join("x" if ms else "." for ms in asked_for).split("x")
    assert max(map(len, gaps)) < 19  # never for the length of the watch


# -------------------------------------------------------------------------------------------------- the adaptive batch


def full(desk: Desk, spent: int) -> int:
    """A full batch whose script took ``spent`` microseconds; answers the size asked for next."""
    size = desk.loop._size
    desk.claims([claim(f"{n}") for n in range(size)], head=-1, spent=spent)
    desk.publishes()
    desk.loop.published(None, desk.now)
    return int(desk.asks("claim").args["limit"])


def test_quick_scripts_make_larger_batches_up_to_the_limit():
    desk = Desk(batch=300)
    sizes = [full(desk, spent=200) for _ in range(4)]
    assert sizes == [200, 300, 300, 300]
    assert desk.stats.batch == 300


def test_slow_scripts_make_smaller_batches_down_to_ten():
    desk = Desk()
    sizes = [full(desk, spent=100_000) for _ in range(6)]
    assert sizes == [50, 25, 12, 10, 10, 10]


def test_the_size_settles_at_the_target():
    desk = Desk()
    size = 100
    for _ in range(10):
        size = full(desk, spent=size * 4)  # 4 µs a job
    assert size == 125  # of the 500 µs that a script should take


def test_a_small_batch_says_nothing_about_the_size():
    desk = Desk()
    desk.holding("a", spent=50_000)
    desk.loop.published(None, desk.now)
    assert desk.asks("claim").args["limit"] == "100"


def test_a_limit_below_ten_is_kept():
    desk = Desk(batch=3)
    assert desk.asks("claim").args["limit"] == "3"
    assert full(desk, spent=10) == 3


# --------------------------------------------------------------------------------------------------------------- stop


def test_stop_while_waiting_hands_the_watch_over():
    desk = Desk()
    desk.claims(head=HOUR)
    desk.sleeps()
    desk.loop.stop()
    desk.leaves()
    assert desk.is_done()


def test_stop_before_anything_was_asked():
    desk = Desk()
    desk.loop.stop()
    assert desk.is_done()


def test_stop_with_the_first_claim_under_way_gives_back_what_it_brings():
    desk = Desk()
    desk.asks("claim")
    desk.loop.stop()
    desk.claims([claim("a"), claim("b")])
    assert [verdict[1] for verdict in desk.settles()] == ["back", "back"]
    desk.leaves()
    assert desk.is_done()


def test_stop_while_publishing_acks_what_was_published():
    desk = Desk()
    batch = desk.holding("a", "b", head=-1)
    desk.loop.stop()
    desk.loop.published(None, desk.now)
    asked = desk.claims()
    assert asked.args["limit"] == "0"
    assert asked.rest == [one.entry for one in batch]
    desk.leaves()
    assert desk.is_done()
    assert desk.stats.released == 2


def test_stop_while_trying_one_by_one_gives_back_the_rest():
    desk = Desk()
    desk.holding("a", "b", "c")
    desk.loop.publish_failed(ValueError("boom"), desk.now)
    desk.publishes()
    desk.loop.stop()
    desk.loop.published(None, desk.now)
    assert [(entry[6:], verb) for entry, verb, *_ in desk.settles()] == [(b"b", "back"), (b"c", "back")]
    assert [entry[6:] for entry in desk.claims().rest] == [b"a"]
    desk.leaves()
    assert desk.is_done()


def test_stop_during_a_pause_of_the_broker():
    desk = Desk()
    desk.holding("a")
    desk.loop.publish_failed(ConnectionError("gone"), desk.now)
    desk.settles()
    desk.leaves()
    desk.sleeps()
    desk.loop.stop()
    desk.leaves()  # it was alive in its pause, and in the list
    assert desk.is_done()


def test_stop_of_one_that_does_not_watch():
    desk = Desk()
    desk.claims(watching=False, left=1.5)
    desk.loop.stop()
    desk.leaves(held=False)
    assert desk.is_done()


@pytest.mark.parametrize(
    ("state", "most"), [("waiting", 2), ("holding", 2), ("given back", 2), ("published", 12), ("acking", 12)]
)
def test_stop_while_redis_is_down_ends_soon_or_while_there_are_acks_to_bring_with_the_lease(state, most):
    desk = Desk(lease=10.0)
    if state == "waiting":
        desk.claims(head=HOUR)
    elif state == "holding":
        desk.claims([claim("a"), claim("b")])
    else:
        batch = desk.holding("a", "b")
        unpublished = [one.entry for one in batch] if state == "given back" else []
        desk.loop.published(Published(unpublished=unpublished), desk.now)
        if state == "acking":
            desk.asks("claim")
            desk.loop.fault(ConnectionError("gone"), desk.now)
    desk.loop.stop()
    started = desk.now
    for _ in range(50):
        action = desk.next()
        if isinstance(action, Done):
            break
        if isinstance(action, Send):
            desk.loop.fault(ConnectionError("gone"), desk.now)
        else:
            assert isinstance(action, Sleep)
            desk.now = action.until
    assert desk.is_done()
    assert most - 5 < desk.now - started < most


def test_stop_while_redis_is_down_for_a_moment_still_brings_the_acks():
    desk = Desk(lease=10.0)
    batch = desk.holding("a")
    desk.loop.published(None, desk.now)
    desk.loop.stop()
    for _ in range(6):
        desk.asks("claim")
        desk.loop.fault(ConnectionError("gone"), desk.now)
        desk.now = desk.sleeps().until
    assert desk.claims().rest == [batch[0].entry]
    desk.leaves()
    assert desk.is_done()


def test_stop_twice_is_stop_once():
    desk = Desk()
    desk.claims()
    desk.loop.stop()
    desk.leaves()
    desk.loop.stop()
    assert desk.is_done()
    assert desk.is_done()
