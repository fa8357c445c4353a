"""Clocks that are set, memory that is full, and very many jobs at once."""

from __future__ import annotations

import time

import pytest

from delayadapters import DelayQueue, NewJob, Outcome, OutOfMemory, Published
from delaytests import FakeClock, redis_binaries, wait_until
from delaytests.releasers import SHELLS, Ledger, Running, allowance

# ------------------------------------------------------------------------------------------------ the clock that is set

HOUR = 3600


def test_a_clock_set_forward_releases_what_is_due_by_it(delays, release, clock: FakeClock):
    queue, done = delays(clock=clock), Ledger()
    queue.schedule_many([NewJob(b"", delay=HOUR - 1, id="a"), NewJob(b"", delay=HOUR + 60, id="b")])
    running = release(done, clock=clock, thorough=1.0)
    wait_until(lambda: running.stats.claims >= 1)
    time.sleep(0.2)
    assert done.ids == []
    clock.advance(HOUR)
    wait_until(lambda: done.ids == ["a"])  # at the next thorough look
    time.sleep(0.2)
    assert done.ids == ["a"]


def test_a_clock_set_back_releases_nothing_early_and_nothing_is_stuck_after(delays, release, clock: FakeClock):
    queue, done = delays(clock=clock), Ledger()
    queue.schedule(b"", id="before", delay=0.3)
    crashed = queue.schedule(b"", id="crashed", delay=0)
    assert [one.id for one in queue.claim(lease=5)] == ["crashed"]  # by a process that dies now
    clock.advance(-HOUR)
    running = release(done, clock=clock, thorough=1.0)
    queue.schedule(b"", id="after", delay=1.0)
    wait_until(lambda: running.stats.claims >= 1)
    time.sleep(1.5)  # by the real clock all of them would be due
    assert done.ids == []
    clock.advance(1.0)
    wait_until(lambda: done.ids == ["after"])
    clock.advance(HOUR + 5)
    wait_until(lambda: set(done.ids) == {"after", "before", "crashed"})
    assert running.stats.requeued == 1
    wait_until(lambda: queue.get("crashed") is None)
    assert crashed.due < clock()


def test_a_clock_that_jumps_to_and_fro_loses_and_doubles_nothing(delays, release, clock: FakeClock):
    queue, done = delays(clock=clock), Ledger()
    running = release(done, clock=clock, thorough=1.0, lease=30.0)
    stored = []
    for n in range(12):
        stored += queue.schedule_many([NewJob(b"", delay=2 * n % 7, id=f"{n}-{k}") for k in range(20)])
        clock.advance((5, -3, 20, -15)[n % 4])
    clock.advance(HOUR)
    wait_until(lambda: len(done) == len(stored))
    wait_until(lambda: running.stats.released == len(stored))
    assert max(done.counts.values()) == 1
    assert running.stats.requeued == 0


# ------------------------------------------------------------------------------------------------------- memory is full


@pytest.mark.parametrize("label", redis_binaries())
def test_a_full_server_refuses_to_schedule_and_still_drains(start_redis, shell, label):
    server = start_redis(label, maxmemory="3mb")
    admin = server.client()
    with DelayQueue.from_url(server.url, name="q") as queue:
        direct, leased = [], []

        def fill():
            for n in range(100_000):
                release = [("RPUSH", "broker", "x" * 100)] if n % 2 else None
                queue.schedule(b"x" * 2000, id=f"{n:05d}", delay=0, release=release)
                (direct if n % 2 else leased).append(f"{n:05d}")

        with pytest.raises(OutOfMemory):
            fill()
        admin.config_set("maxmemory", "1mb")  # below what an empty server needs: full to the end
        with pytest.raises(OutOfMemory):
            queue.schedule_many([NewJob(b"x", delay=0, id=f"more-{n}") for n in range(10)])
        assert queue.stats().waiting == admin.hlen("{q:0}:entries") == len(direct) + len(leased)
        assert queue.cancel(leased[0]) is Outcome.CANCELLED
        cancelled = leased.pop(0)
        failing = set(leased[:5])

        def publish(batch):
            if len(done) < 100:
                time.sleep(0.3)  # long enough to be renewed
            return Published(failed={one.entry: "no" for one in batch if one.id in failing and one.attempts == 0})

        done = Ledger(publish)
        running = Running(shell, server.url, "q", done, lease=0.3, backoff=0.1, batch=200)
        try:
            wait_until(lambda: queue.stats().waiting == queue.stats().leased == 0)
            wait_until(lambda: running.stats.released == len(leased))
            assert running.stats.direct == len(direct) == admin.llen("broker")
            assert sorted(done.ids) == sorted(leased)
            assert cancelled not in done.ids
            assert running.stats.failed == 5
            assert running.stats.requeued == running.stats.faults == running.stats.dead == 0
            with pytest.raises(OutOfMemory):
                queue.schedule(b"", id="still-full", delay=0)
            admin.config_set("maxmemory", "0")
            queue.schedule(b"", id="again", delay=0.05)
            wait_until(lambda: done.ids[-1] == "again")
        finally:
            assert running.stop(30)


# ------------------------------------------------------------------------------------------------------------ very many


def cpu_seconds(admin):
    cpu = admin.info("cpu")
    return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shell", ["both"])
@pytest.mark.parametrize("count", [60_000, pytest.param(200_000, marks=pytest.mark.scale)])
def test_very_many_due_at_once_stall_neither_redis_nor_the_releasing_processes(queue, spawn, admin, ledger, count):
    for start in range(0, count, 20_000):
        queue.schedule_many([NewJob(b"x" * 100, delay=0, id=f"{n:06d}") for n in range(start, start + 20_000)])
    admin.config_set("slowlog-log-slower-than", 10_000)
    admin.config_set("slowlog-max-len", 1000)
    admin.slowlog_reset()
    admin.config_resetstat()
    before = cpu_seconds(admin)
    processes = [spawn(shell=shell, check=False, brief=True, hold=True, ready=False) for shell in SHELLS]
    for process in processes:
        process.expect("ready")
    for process in processes:
        process.go()
    wait_until(lambda: ledger.path.exists() and ledger.path.stat().st_size > 40_000, timeout=120, interval=0.02)
    early = [process.rss() for process in processes]
    most = list(early)
    while ledger.path.stat().st_size < count:
        most = [max(before, process.rss()) for before, process in zip(most, processes, strict=True)]
        assert all(process.process.poll() is None for process in processes)
        time.sleep(0.02)
    wait_until(lambda: queue.stats().leased == queue.stats().waiting == 0)
    # CPU time of Redis' main thread: the wall clock is another matter on a shared machine.
    spent, claims = cpu_seconds(admin) - before, admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert spent / claims < 0.003, f"{claims} scripts took {spent} s"
    slow = [entry["duration"] for entry in admin.slowlog_get(1000)]
    if not allowance():  # on a busy one even a ZCARD takes 10 ms whenever the CPU is taken away
        assert len(slow) < 30, slow
        assert sum(one > 50_000 for one in slow) <= 2, slow
    stats = [process.stop() for process in processes]
    for shell, before, after, one in zip(SHELLS, early, most, stats, strict=True):
        assert after - before < 16 << 20, f"{shell}: {before >> 20} MiB grew to {after >> 20} MiB"
        assert one["requeued"] == one["stale_acks"] == 0
        assert one["released"] > count / 10
    assert sum(one["released"] for one in stats) == count
