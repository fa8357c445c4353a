"""Slow, hanging and failing publishers; brokers that are down; the retry that comes before its own ack."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from delayadapters import NewJob, Outcome, Published, State
from delaytests import wait_until
from delaytests.releasers import Ledger, allowance


def jobs(*ids, delay=0.0):
    return [NewJob(id.encode(), delay=delay, id=id) for id in ids]


# ------------------------------------------------------------------------------------------------------ slow, hanging


def test_a_slow_publisher_keeps_its_leases(queue, release):
    slow = Ledger(lambda batch: time.sleep(4.4))
    other = Ledger()
    owner = release(slow, lease=2.0)
    wait_until(lambda: owner.stats.claims >= 1)
    queue.schedule_many(jobs("a", "b", "c"))
    wait_until(lambda: queue.stats().leased == 3)
    bystander = release(other, lease=2.0)
    wait_until(lambda: owner.stats.released == 3)
    assert slow.ids == ["a", "b", "c"]
    assert len(other) == 0
    assert (owner.stats.stale_acks, owner.stats.requeued, bystander.stats.requeued) == (0, 0, 0)


def test_a_publisher_that_sends_one_by_one_and_asks_each_time_keeps_its_leases(queue, spawn, release, ledger):
    spawn(each=0.5, lease=3.0)
    time.sleep(0.3)
    queue.schedule_many(jobs(*"abcdefgh"))
    wait_until(lambda: queue.stats().leased == 8)
    other = Ledger()
    release(other, lease=3.0)
    wait_until(lambda: len(ledger) == 8)
    wait_until(lambda: queue.stats().leased == 0)
    assert ledger.ids == list("abcdefgh")
    assert len(other) == 0


def test_jobs_tried_alone_keep_their_leases(queue, release):
    """Each takes a quarter of the lease; together they take twice as long as it."""

    def publish(batch):
        if len(batch) > 1:
            raise ValueError("one of them is bad")
        time.sleep(0.5)

    done, other = Ledger(publish), Ledger()
    owner = release(done, lease=2.0)
    wait_until(lambda: owner.stats.claims >= 1)
    queue.schedule_many(jobs(*"abcdefgh"))
    wait_until(lambda: queue.stats().leased == 8)
    bystander = release(other, lease=2.0)
    wait_until(lambda: queue.stats().leased == queue.stats().waiting == 0)
    assert done.ids == list("abcdefgh")
    assert len(other) == 0
    assert (bystander.stats.requeued, owner.stats.stale_acks) == (0, 0)


def test_a_hanging_publisher_is_taken_over_and_its_late_ack_refused(queue, release):
    hanging, asked = threading.Event(), threading.Event()

    def hang(batch):
        asked.set()
        assert hanging.wait(60)

    late, rest = Ledger(hang), Ledger()
    owner = release(late, lease=0.5, patience=1.0)
    wait_until(lambda: owner.stats.claims >= 1)
    queue.schedule_many(jobs("a", "b"))
    assert asked.wait(30)
    try:
        survivor = release(rest, lease=0.5)
        wait_until(lambda: rest.ids == ["a", "b"])
        assert survivor.stats.requeued == 2
        assert {line.requeues for line in rest.lines} == {1}
        wait_until(lambda: survivor.stats.released == 2)
        again = queue.schedule(b"", id="a", delay=60)  # nobody's ack may take this one away
    finally:
        hanging.set()
    wait_until(lambda: owner.stats.stale_acks == 2)
    assert owner.stats.released == 0
    assert queue.get("a").due == again.due


def test_a_late_ack_does_not_take_the_job_from_who_publishes_it_now(queue, release):
    hanging, asked, second, acked = (threading.Event() for _ in range(4))

    def hang(batch):
        asked.set()
        assert hanging.wait(60)

    def publish(batch):
        second.set()
        assert acked.wait(60)

    late, rest = Ledger(hang), Ledger(publish)
    owner = release(late, lease=0.5, patience=1.0)
    queue.schedule_many(jobs("a", "b"))
    assert asked.wait(30)
    survivor = release(rest, lease=0.5)
    try:
        assert second.wait(30)
        hanging.set()
        wait_until(lambda: owner.stats.stale_acks == 2)
        assert queue.stats().leased == 2
        assert queue.cancel("a") is Outcome.IN_FLIGHT
    finally:
        hanging.set()
        acked.set()
    wait_until(lambda: survivor.stats.released == 2)
    assert (owner.stats.released, survivor.stats.stale_acks) == (0, 0)


def test_a_hanging_publisher_that_nobody_took_over_is_acked_in_the_end(queue, release):
    hanging = threading.Event()

    def hang(batch):
        assert hanging.wait(60)

    done = Ledger(hang)
    owner = release(done, lease=0.3, patience=0.5)
    queue.schedule_many(jobs("a"))
    wait_until(lambda: queue.stats().leased == 1)
    time.sleep(1.2)
    hanging.set()
    wait_until(lambda: owner.stats.released == 1)
    assert done.ids == ["a"]
    assert owner.stats.stale_acks == 0


@pytest.mark.parametrize("shell", ["thread"])
def test_a_batch_that_waited_too_long_for_another_shards_publish_is_not_published(delays, release):
    """One publish at a time: while one shard's takes longer than the patience, the other's batch is taken over."""
    queue = delays(shards=2)
    of_shard = {}
    for n in range(20):
        of_shard.setdefault(queue._verbs._of(b"%d" % n), []).append(str(n))
    first, second = (ids[:3] for ids in of_shard.values())
    begun, go_on = threading.Event(), threading.Event()

    def publish(batch):
        if batch[0].id in first:
            begun.set()
            while not go_on.is_set():
                batch.ensure_held()  # slow, and alive
                time.sleep(0.02)

    done, rest = Ledger(publish), Ledger()
    owner = release(done, shards=2, lease=0.5, patience=0.4)
    queue.schedule_many(jobs(*first))
    assert begun.wait(30)
    queue.schedule_many(jobs(*second))
    wait_until(lambda: queue.stats().leased == 6)
    release(rest, shards=2, lease=0.5)
    try:
        wait_until(lambda: sorted(rest.ids) == sorted(second))
        wait_until(lambda: queue.stats().leased == 3)
    finally:
        go_on.set()
    wait_until(lambda: owner.stats.released == 3)
    queue.schedule_many(jobs("after", delay=0.1))
    wait_until(lambda: "after" in done.ids + rest.ids)
    assert sorted(set(done.ids) - {"after"}) == sorted(first)
    assert max((done.counts + rest.counts).values()) == 1


# ----------------------------------------------------------------------------------------------------- the broker down


class Broker:
    """Down until it is up."""

    def __init__(self, how):
        self.how = how
        self.up = False
        self.tries = 0

    def __call__(self, batch):
        if self.up:
            return None
        self.tries += 1
        if self.how == "OSError":
            raise ConnectionRefusedError("no broker here")
        if self.how == "half":
            left = [one.entry for one in batch[len(batch) // 2 :]]
            return Published(unpublished=left, broker_down="went away")
        return Published(unpublished=[one.entry for one in batch], broker_down="connection refused")


@pytest.mark.parametrize("how", ["OSError", "Published", "half"])
def test_a_broker_that_is_down_burns_nothing_and_is_tried_again(queue, release, how):
    broker = Broker(how)
    done = Ledger(broker)
    running = release(done, lease=30.0)
    ids = [f"{n:02d}" for n in range(16)]
    queue.schedule_many(jobs(*ids))
    wait_until(lambda: broker.tries >= 2)
    if how != "half":
        wait_until(lambda: queue.stats().leased == 0)  # given back, not left to their leases
        assert queue.stats().waiting == 16
    broker.up = True
    wait_until(lambda: running.stats.released == 16)
    assert sorted(done.ids) == ids
    assert {line.attempts for line in done.lines} == {0}
    assert {line.requeues for line in done.lines} == {0}
    assert running.stats.failed == running.stats.dead == 0
    assert running.stats.pauses == broker.tries
    assert queue.stats().dead == 0


def test_while_the_broker_is_down_redis_is_asked_little(queue, release, admin):
    broker = Broker("OSError")
    running = release(Ledger(broker), lease=30.0)
    queue.schedule_many(jobs(*(f"{n}" for n in range(50))))
    wait_until(lambda: running.stats.pauses >= 3)
    claims, tries = running.stats.claims, broker.tries
    time.sleep(2.0)
    assert broker.tries - tries <= 4
    assert running.stats.claims - claims <= 8


def test_another_loop_with_a_working_broker_takes_over(queue, release, watching):
    down, done = Broker("OSError"), Ledger()
    paused = release(Ledger(down), lease=30.0)
    watching()
    release(done, lease=30.0)
    time.sleep(0.3)
    queue.schedule_many(jobs(*"abcd", delay=0.05))
    wait_until(lambda: len(done) == 4)
    assert max(line.lateness for line in done.lines) < 1.0 + allowance()  # by the watch handed over, not by the lease
    queue.schedule_many(jobs(*"efgh", delay=0.05))
    wait_until(lambda: len(done) == 8)
    assert paused.stats.failed == 0
    assert {line.attempts for line in done.lines} == {0}


# --------------------------------------------------------------------------------------------------------- bad jobs


@pytest.mark.parametrize("how", ["named", "raised"])
def test_one_bad_job_stops_nothing_and_is_dead_in_the_end(queue, release, how):
    repaired = threading.Event()

    def publish(batch):
        bad = {one.entry: "cannot be encoded" for one in batch if one.payload == b"bad"}
        if repaired.is_set() or not bad:
            return None
        if how == "named":
            return Published(failed=bad)
        raise ValueError("cannot be encoded")

    done = Ledger(publish)
    running = release(done, max_attempts=3, backoff=0.1)
    queue.schedule_many(jobs("a", "b", "bad", "c", "d", delay=0.1))
    wait_until(lambda: sorted(done.ids) == ["a", "b", "c", "d"])
    (dead,) = wait_until(lambda: queue.dead_jobs().jobs)
    assert (dead.id, dead.payload, dead.state, dead.attempts) == ("bad", b"bad", State.DEAD, 3)
    assert "cannot be encoded" in dead.reason
    assert running.stats.failed == 3
    assert queue.stats().waiting == queue.stats().leased == 0

    repaired.set()
    assert queue.replay("bad") is Outcome.REPLAYED
    wait_until(lambda: "bad" in done.ids)
    assert done.lines[-1].attempts == 0
    assert max(done.counts.values()) == 1


def test_a_failed_job_waits_for_its_retry_and_delays_nobody(queue, release):
    tried = []

    def publish(batch):
        now = time.monotonic()
        tried.extend((one.id, now) for one in batch)
        return Published(failed={one.entry: "no" for one in batch if one.id == "bad" and one.attempts < 2})

    done = Ledger(publish)
    running = release(done, backoff=0.4)
    queue.schedule(b"", id="bad", delay=0)
    wait_until(lambda: running.stats.failed == 1)
    for n in range(5):
        queue.schedule(b"", id=f"{n}", delay=0.02)
        wait_until(lambda n=n: f"{n}" in done.ids)
        assert 0 <= done.lateness(f"{n}") < 0.4 + allowance()
    wait_until(lambda: "bad" in done.ids)
    times = [at for id, at in tried if id == "bad"]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert len(pauses) == 2
    assert 0.2 <= pauses[0] <= 0.4 + 0.5 + allowance()
    assert 0.4 <= pauses[1] <= 0.8 + 0.5 + allowance()


def test_every_job_bad_is_no_busy_loop(queue, release):
    calls = []

    def publish(batch):
        calls.append(len(batch))
        raise RuntimeError("a publisher with a mistake in it")

    running = release(publish, max_attempts=100, backoff=0.5)
    queue.schedule_many(jobs(*"abcdefghij"))
    wait_until(lambda: running.stats.failed >= 10)
    before = len(calls)
    time.sleep(1.0)
    assert len(calls) - before <= 50
    assert queue.stats().dead == 0


# ------------------------------------------------------------------------------------- the retry before its own ack


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_a_task_that_schedules_its_id_again_before_its_first_ack(queue, release, delay):
    """A retry: the task ran the moment it was published, failed, and reuses its id (Celery, taskiq)."""
    seconds = []

    def run_at_once(batch):
        for one in batch:
            if one.payload == b"first":
                seconds.append(queue.schedule(b"second", id=one.id, delay=delay, if_exists="add"))
                assert queue.stats().leased >= 1

    done = Ledger(run_at_once)
    running = release(done)
    queue.schedule(b"first", id="task", delay=0.05)
    wait_until(lambda: len(done) == 2)
    wait_until(lambda: running.stats.released == 2)
    assert done.ids == ["task", "task"]
    assert done.lines[0].entry != done.lines[1].entry
    assert done.lines[1].at >= seconds[0].due / 1e6
    assert seconds[0].outcome is Outcome.SCHEDULED
    assert (running.stats.stale_acks, running.stats.requeued) == (0, 0)
    assert queue.get("task") is None
    assert queue.cancel("task") is Outcome.RELEASED


def test_a_retry_before_the_ack_is_there_after_it_and_can_be_cancelled(queue, release):
    def run_at_once(batch):
        for one in batch:
            queue.schedule(b"second", id=one.id, delay=60, if_exists="add")

    done = Ledger(run_at_once)
    running = release(done)
    queue.schedule(b"first", id="task", delay=0)
    wait_until(lambda: running.stats.released == 1)
    job = queue.get("task")
    assert (job.payload, job.state) == (b"second", State.WAITING)
    assert queue.cancel("task") is Outcome.CANCELLED
    assert queue.get("task") is None
    assert done.ids == ["task"]


def test_a_chain_of_retries_each_before_the_last_ack(queue, release):
    def run_at_once(batch):
        for one in batch:
            count = int(one.payload)
            if count < 20:
                queue.schedule(b"%d" % (count + 1), id=one.id, delay=0, if_exists="add")

    done = Ledger(run_at_once)
    running = release(done)
    queue.schedule(b"1", id="task", delay=0)
    wait_until(lambda: running.stats.released == 20)
    assert len({line.entry for line in done.lines}) == 20
    assert queue.get("task") is None


@pytest.mark.parametrize("end", ["fails", "expires"])
def test_a_retry_beside_a_first_entry_that_comes_back(queue, release, end):
    """The first entry is released again (its publish failed after all); the retry is untouched by that."""
    added = threading.Event()
    hold = threading.Event()

    def publish(batch):
        for one in batch:
            if one.payload == b"first" and not added.is_set():
                queue.schedule(b"second", id=one.id, delay=0.6, if_exists="add")
                added.set()
                if end == "fails":
                    return Published(failed={one.entry: "no"})
                hold.wait(60)
        return None

    done = Ledger(publish)
    first = release(done, lease=0.4, patience=0.3, backoff=0.1)
    queue.schedule(b"first", id="task", delay=0)
    assert added.wait(30)
    rest = Ledger()
    other = release(rest, lease=0.4)
    try:
        wait_until(lambda: first.stats.released + other.stats.released == 2)
    finally:
        hold.set()
    wait_until(lambda: queue.stats().leased == queue.stats().waiting == 0)
    assert len({line.entry for line in done.lines + rest.lines}) == 2
    assert queue.get("task") is None
