"""Who wakes when, and what an idle loop costs (design §3, promises 6 and 11; §9, the idle row)."""

from __future__ import annotations

import contextlib
import time

import pytest

from delayadapters import DelayQueue, NewJob
from delayadapters.redis.verbs import CHUNK_JOBS
from delaytests import count_commands, count_messages, wait_until
from delaytests.releasers import SHELLS, Ledger, Running, allowance


def standing_by(*running):
    """Each has asked for the watch, and its subscription stands."""
    wait_until(lambda: all(one.stats.claims >= 1 for one in running))
    time.sleep(0.3)


def test_a_new_earliest_job_of_another_process_wakes_the_sleeper(queue, spawn, ledger):
    queue.schedule(b"", id="far", delay=3600)
    spawn()
    time.sleep(0.5)
    for n in range(5):
        queue.schedule(b"", id=f"{n}", delay=0.05)
        wait_until(lambda n=n: f"{n}" in ledger.ids)
    late = [line.lateness for line in ledger.lines]
    assert min(late) >= 0  # never early
    assert sorted(late)[2] < 0.3 + allowance()  # not at the safety poll: most well before
    assert max(late) < 0.6 + allowance()


def test_later_jobs_wake_nobody(queue, release, admin, name):
    queue.schedule(b"", id="head", delay=3600)
    done = Ledger()
    running = release(done)
    standing_by(running)
    (shard,) = running._releaser._shards
    told, tell = [], shard._tell

    def listen(message):
        told.append(message)
        tell(message)

    shard._tell = listen
    with count_messages(admin, f"{{{name}:*}}:wake") as heard:
        queue.schedule_many([NewJob(b"", delay=3601 + n, id=f"{n}") for n in range(10_000)])
        for n in range(100):
            queue.schedule(b"", id=f"single-{n}", delay=4000)
        queue.reschedule("single-1", delay=5000)
        queue.cancel("single-2")
        time.sleep(0.2)
        assert heard.all() == []
        assert told == []
        queue.schedule(b"", id="earlier", delay=3000)
        queue.reschedule("single-3", delay=2000)
        assert [data.split()[0] for _, data in heard.all()] == [b"due", b"due"]
        wait_until(lambda: len(told) == 2)
    assert len(done) == 0


def test_a_new_earliest_job_is_told_of_once_however_many_come_in_one_round_trip(queue, admin, name):
    with count_messages(admin, f"{{{name}:*}}:wake") as heard:
        queue.schedule_many([NewJob(b"", delay=100 - n / 100, id=f"{n}") for n in range(CHUNK_JOBS)])
        assert len(heard) == 1


def test_only_the_watcher_acts_on_a_new_head(queue, release, watching):
    watcher = release(Ledger())
    watching()
    others = [release(Ledger()) for _ in range(3)]
    standing_by(watcher, *others)
    before = [one.stats.claims for one in others]
    for n in range(3):
        queue.schedule(b"", id=f"{n}", delay=0.05)
        wait_until(lambda n=n: watcher.stats.released == n + 1)
    assert [one.stats.claims for one in others] == before


def test_help_comes_when_a_claim_leaves_due_work_behind(queue, release, watching):
    slow = Ledger(lambda batch: time.sleep(0.3))
    watcher = release(slow, batch=10)
    watching()
    helpers = [Ledger(lambda batch: time.sleep(0.3)) for _ in range(3)]
    standing_by(watcher, *(release(one, batch=10) for one in helpers))
    queue.schedule_many([NewJob(b"", delay=0.05, id=f"{n:03d}") for n in range(120)])
    begun = time.monotonic()
    wait_until(lambda: len(slow) + sum(map(len, helpers)) == 120)
    assert time.monotonic() - begun < 12 * 0.3 + allowance()
    assert all(len(one) for one in helpers)
    assert len({*slow.ids, *(id for one in helpers for id in one.ids)}) == 120


def test_jobs_scheduled_while_the_loop_publishes_are_released_next(queue, release):
    def busy(batch):
        if batch[0].id == "slow":
            time.sleep(0.5)

    done = Ledger(busy)
    standing_by(release(done))
    queue.schedule(b"", id="slow", delay=0)
    wait_until(lambda: queue.stats().leased == 1)
    queue.schedule(b"", id="meanwhile", delay=0.1)
    queue.schedule(b"", id="later", delay=0.7)
    wait_until(lambda: done.ids == ["slow", "meanwhile", "later"])
    assert 0 <= done.lateness("later") < 0.3 + allowance()


def test_release_now_and_reschedule_wake_the_sleeper(queue, release):
    done = Ledger()
    standing_by(release(done))
    queue.schedule_many([NewJob(b"", delay=3600, id="now"), NewJob(b"", delay=3600, id="sooner")])
    begun = time.time()
    queue.release_now("now")
    queue.reschedule("sooner", delay=0.1)
    wait_until(lambda: done.ids == ["now", "sooner"])
    assert done.lines[0].at - begun < 0.5 + allowance()
    assert 0 <= done.lateness("sooner") < 0.3 + allowance()


def test_a_cancelled_head_is_not_released_and_delays_nobody(queue, release):
    done = Ledger()
    standing_by(release(done))
    queue.schedule_many([NewJob(b"", delay=0.3, id="head"), NewJob(b"", delay=0.5, id="next")])
    assert queue.cancel("head").value == "cancelled"
    wait_until(lambda: done.ids == ["next"])
    assert 0 <= done.lateness("next") < 0.3 + allowance()


# ---------------------------------------------------------------------------------------------------------------- idle

SECONDS = 8.0


@pytest.mark.slow
def test_what_idle_loops_cost(start_redis):
    """One loop and eight, of each shell, each on a server of its own and all at once: it takes long enough."""
    cases = []
    try:
        for shell in SHELLS:
            for loops in (1, 8):
                server = start_redis()
                with DelayQueue.from_url(server.url, name="q") as queue:
                    queue.schedule(b"", id="far", delay=3600)
                running = [Running(shell, server.url, "q", Ledger()) for _ in range(loops)]
                cases.append((server, running))
        standing_by(*(one for _, running in cases for one in running))
        time.sleep(1.0)
        # A machine too busy to renew a watch in time adds commands, and never takes any away: look up to three times.
        for last in (False, False, True):
            with contextlib.ExitStack() as stack:
                counted = [stack.enter_context(count_commands(server.client())) for server, _ in cases]
                time.sleep(SECONDS)
            dear = []
            for (_, running), commands in zip(cases, counted, strict=True):
                a_second = commands.total / SECONDS
                case = f"{len(running)} {running[0].shell}: {a_second}, {dict(commands.now())}"
                assert a_second >= 1.0, f"it looks too seldom; {case}"
                if a_second > 3.0 + 0.6 * (len(running) - 1):
                    dear.append(case)
            if not dear:
                break
            assert not last, dear
    finally:
        for _, running in cases:
            for one in running:
                one.stop(30)
