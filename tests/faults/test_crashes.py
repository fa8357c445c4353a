"""Processes killed in each gap: nothing is lost, and doubled only where the contract allows it (design §3, 2 and 4)."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

from delayadapters import DelayQueue, NewJob
from delayadapters.redis.verbs import CHUNK_JOBS
from delaytests import RedisServer, wait_until
from delaytests.releasers import SHELLS, FileLedger, Ledger, ReleasingProcess, Running, allowance, run_module

LEASE = 0.6
JOBS = 20


def soon(count, *, prefix="", delay=0.0):
    return [NewJob(b"payload", delay=delay, id=f"{prefix}{n:05d}") for n in range(count)]


def ids(count, prefix=""):
    return [f"{prefix}{n:05d}" for n in range(count)]


# ------------------------------------------------------------------------------ a releasing process, killed in each gap


@pytest.mark.parametrize("gap", ["claimed", "half", "published", "acked"])
def test_a_releasing_process_killed_in_a_gap(queue, spawn, release, ledger, gap):
    victim = spawn(pause=gap, lease=LEASE)
    queue.schedule_many(soon(JOBS))
    victim.expect("paused")
    victim.kill()
    killed = time.time()
    before = ledger.counts
    assert len(ledger) == {"claimed": 0, "half": JOBS // 2, "published": JOBS, "acked": JOBS}[gap]

    rest = Ledger()
    survivor = release(rest, lease=LEASE)
    if gap == "acked":
        queue.schedule(b"another", id="another", delay=0)
        wait_until(lambda: "another" in rest.ids)
        assert rest.ids == ["another"]
        assert survivor.stats.requeued == 0
        return
    wait_until(lambda: len(rest) >= JOBS)
    # Nothing lost; doubled is exactly what was published and not acked, under the same entry; counted as re-queued.
    assert rest.ids == ids(JOBS)
    assert survivor.stats.requeued == JOBS
    assert {line.requeues for line in rest.lines} == {1}
    assert before + rest.counts == {id: 1 + (before[id] > 0) for id in ids(JOBS)}
    entries = {line.id: line.entry for line in ledger.lines}
    assert all(entries.get(line.id, line.entry) == line.entry for line in rest.lines)
    # Not before the lease has passed, and soon after.
    assert all(-0.3 < line.at - killed < LEASE + 2.5 + allowance() for line in rest.lines)
    wait_until(lambda: survivor.stats.released == JOBS)
    assert queue.stats().leased == queue.stats().waiting == 0


def test_a_process_killed_while_it_publishes_slowly_had_renewed_its_leases(queue, spawn, release, ledger):
    victim = spawn(each=0.4, lease=0.5)
    queue.schedule_many(soon(6))
    rest = Ledger()
    survivor = release(rest, lease=0.5)
    wait_until(lambda: len(ledger) >= 3 or len(rest) >= 3)  # the second one helps, if it wins the claim
    victim.kill()
    wait_until(lambda: set(ledger.ids) | set(rest.ids) == set(ids(6)))
    wait_until(lambda: queue.stats().leased == queue.stats().waiting == 0)
    doubled = [id for id, count in (ledger.counts + rest.counts).items() if count > 1]
    assert len(doubled) <= survivor.stats.requeued


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_process_that_ends_by_itself_gives_back_and_one_that_is_killed_cannot(queue, spawn, release, ledger, how):
    lease = 1.5 if how == "SIGKILL" else 15.0
    victim = spawn(pause="claimed" if how == "SIGKILL" else None, each=0.05, lease=lease, batch=1)
    queue.schedule_many(soon(8))
    if how == "SIGKILL":
        victim.expect("paused")
        victim.kill()
    else:
        wait_until(lambda: len(ledger) >= 2)
        stats = victim.stop()
        assert stats["released"] == len(ledger)
        assert queue.stats().leased == 0
    ended = time.time()
    rest = Ledger()
    release(rest, lease=lease)
    wait_until(lambda: set(ledger.ids) | set(rest.ids) == set(ids(8)))
    assert max((ledger.counts + rest.counts).values()) == 1
    if how == "SIGTERM":
        assert max(line.at for line in rest.lines) - ended < lease


# ------------------------------------------------------------------------------------------------------ many at once


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shell", ["both"])
@pytest.mark.parametrize("count", [8_000, pytest.param(20_000, marks=pytest.mark.scale)])
def test_eight_releasing_processes_release_many_due_jobs_once_each(queue, spawn, ledger, count):
    processes = [spawn(shell=SHELLS[number % 2], lease=30.0, ready=False) for number in range(8)]
    for process in processes:
        process.expect("ready")
    queue.schedule_many(soon(count))
    wait_until(lambda: len(ledger) >= count, timeout=120, interval=0.05)
    time.sleep(0.2)
    stats = [process.stop() for process in processes]
    assert sorted(ledger.ids) == ids(count)  # each once
    assert sum(one["released"] for one in stats) == count
    assert sum(one["requeued"] + one["stale_acks"] + one["failed"] for one in stats) == 0
    assert sum(one["released"] > 0 for one in stats) >= 2, "nobody helped"
    assert queue.stats().waiting == queue.stats().leased == 0


@pytest.mark.parametrize("shards", [1, 3])
def test_one_loop_releases_in_due_order_per_shard(delays, release, shards):
    queue = delays(shards=shards)
    jobs = [NewJob(b"", delay=0.3 + (n * 7919 % 1000) / 1000, id=f"{n:04d}") for n in range(1000)]
    stored = {job.id: job for job in queue.schedule_many(jobs)}
    done = Ledger()
    release(done, shards=shards)
    wait_until(lambda: len(done) == 1000)
    of_shard: dict[object, list[int]] = {}
    for id in done.ids:
        of_shard.setdefault(queue._verbs._of(id.encode()), []).append(stored[id].due)
    assert len(of_shard) == shards
    assert all(dues == sorted(dues) for dues in of_shard.values())
    assert min(line.lateness for line in done.lines) >= 0


def test_a_thousand_equal_due_times_come_out_in_the_order_they_were_scheduled(queue, release):
    first = queue.schedule(b"", delay=0.6, id="first")
    at = first.due_at
    queue.schedule_many([NewJob(b"", at=at, id=f"{n * 7919 % 1000:04d}") for n in range(1000)])
    done = Ledger()
    release(done)
    wait_until(lambda: len(done) == 1001)
    assert done.ids == ["first", *(f"{n * 7919 % 1000:04d}" for n in range(1000))]
    assert min(line.lateness for line in done.lines) >= 0


# ------------------------------------------------------------------------------------------------------ Redis killed


def test_redis_with_aof_always_is_killed_and_comes_back(start_redis, shell, tmp_path):
    server: RedisServer = start_redis(aof="always")
    ledger = FileLedger(tmp_path / "ledger")
    process = ReleasingProcess(shell, server.url, "q", ledger.path, lease=2.0)
    process.expect("ready")
    here = Ledger()
    running = Running(shell, server.url, "q", here, lease=2.0)
    acknowledged: list[str] = []
    with DelayQueue.from_url(server.url, name="q", timeout=20) as queue:
        try:
            for round_ in range(3):
                before = ids(300, f"{round_}-")
                queue.schedule_many(soon(300, prefix=f"{round_}-", delay=0.2))
                acknowledged += before
                time.sleep(0.15)
                server.kill()  # while some are waiting, some due, some leased
                time.sleep(0.2)
                server.restart(wait=False)
                queue.schedule(b"", id=f"meanwhile-{round_}", delay=0)  # rides it out
                acknowledged.append(f"meanwhile-{round_}")
            wait_until(lambda: set(ledger.ids) | set(here.ids) >= set(acknowledged))
            wait_until(lambda: queue.stats().waiting == queue.stats().leased == 0)
            stats = process.stop()
            assert running.stop(30)
            lines = ledger.lines + here.lines
            assert {line.id for line in lines} == set(acknowledged)
            assert min(line.lateness for line in lines) >= 0
            # What was doubled had its lease passed before an ack could be brought.
            doubled = len(lines) - len(acknowledged)
            assert doubled <= stats["requeued"] + running.stats.requeued
        finally:
            running.stop(30)
            process.close()


def test_a_releaser_told_to_stop_while_redis_restarts_still_acks_what_it_has_published(start_redis, shell):
    server: RedisServer = start_redis(aof="always")
    published, go_on = threading.Event(), threading.Event()

    def publish(batch):
        published.set()
        assert go_on.wait(60)

    done = Ledger(publish)
    running = Running(shell, server.url, "q", done, lease=10.0)
    with DelayQueue.from_url(server.url, name="q", timeout=20) as queue:
        queue.schedule_many(soon(10))
        assert published.wait(30)
        server.kill()
        go_on.set()
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        time.sleep(1.2)
        server.restart()
        stopping.join(60)
        assert not stopping.is_alive()
        assert done.ids == ids(10)
        assert running.stats.released == 10
        assert queue.stats().leased == queue.stats().waiting == 0


def test_a_client_killed_in_the_middle_of_schedule_many(queue, release, admin, name):
    code = "delaytests.scheduling"
    client = run_module(code, json.dumps({"url": queue_url(admin), "name": name, "count": 100_000, "delay": 1.5}))
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        wait_until(lambda: admin.zcard(f"{{{name}:0}}:due") >= 2000, interval=0.0005)
        client.kill()
        client.wait(30)
    finally:
        client.kill()
        for stream in (client.stdin, client.stdout):
            if stream is not None:
                stream.close()
    stored = queue.stats().waiting
    assert 2000 <= stored < 100_000, "it was not killed in the middle"
    assert stored % CHUNK_JOBS == 0  # each round trip's chunk wholly, or not at all
    page, cursor = queue.jobs(limit=1000), None
    seen: list[str] = []
    while True:
        page = queue.jobs(limit=1000, cursor=cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(seen) == ids(stored)
    done = Ledger()
    release(done)
    wait_until(lambda: len(done) >= stored, timeout=60)
    assert sorted(done.ids) == ids(stored)
    assert min(line.lateness for line in done.lines) >= 0


def queue_url(admin):
    return f"redis://127.0.0.1:{admin.connection_pool.connection_kwargs['port']}/0"


# ------------------------------------------------------------------------------------------------------- the watcher


def test_when_the_watcher_is_killed_another_loop_releases_within_the_watch_lease(
    queue, spawn, release, watching, ledger
):
    victim = spawn()
    first = watching()
    rest = Ledger()
    release(rest)
    queue.schedule(b"", id="before", delay=0.3)
    wait_until(lambda: len(ledger) == 1)
    victim.kill()
    queue.schedule(b"", id="after", delay=0.05)
    wait_until(lambda: rest.ids == ["after"])
    assert 0 <= rest.lateness("after") < 2.3 + allowance()
    assert watching() != first


def test_a_watcher_that_is_told_to_end_hands_the_watch_over_at_once(
    queue, spawn, release, watching, ledger, admin, name
):
    leaver = spawn()
    first = watching()
    rest = Ledger()
    release(rest)
    time.sleep(0.3)  # until the other one stands by
    queue.schedule(b"", id="job", delay=1.2)
    leaver.stop()
    assert admin.get(f"{{{name}:0}}:watch") != first
    wait_until(lambda: rest.ids == ["job"])
    assert 0 <= rest.lateness("job") < 0.3 + allowance()
    assert len(ledger) == 0


def test_a_watcher_stopped_in_this_process_hands_the_watch_over_at_once(queue, release, watching, admin, name):
    there, rest = Ledger(), Ledger()
    leaver = release(there)
    first = watching()
    release(rest)
    time.sleep(0.3)
    queue.schedule(b"", id="job", delay=0.6)
    assert leaver.stop()
    assert admin.get(f"{{{name}:0}}:watch") != first
    wait_until(lambda: rest.ids == ["job"])
    assert 0 <= rest.lateness("job") < 0.3 + allowance()


# --------------------------------------------------------------------------------------------------- SIGSTOP, SIGCONT


def test_a_suspended_watcher_that_resumes_does_not_act_on_what_it_held(queue, spawn, release, ledger, watching):
    """Stopped with a batch in hand, past its watch and its leases: another loop has taken the batch over."""
    sleeper = spawn(pause="half", lease=0.6)
    first = watching()
    queue.schedule_many(soon(10))
    sleeper.expect("paused")
    sleeper.suspend()
    rest = Ledger()
    survivor = release(rest, lease=0.6)
    wait_until(lambda: len(rest) == 10)
    wait_until(lambda: survivor.stats.released == 10)
    assert watching() != first
    sleeper.go()
    sleeper.resume()
    queue.schedule_many(soon(50, prefix="later-"))
    wait_until(lambda: len(rest) + len(ledger) == 10 + 5 + 50)
    stats = sleeper.stop()
    assert [id for id in ledger.ids if not id.startswith("later-")] == ids(5)  # the half from before, no more
    assert stats["failed"] == 0
    counts = ledger.counts + rest.counts
    assert all(counts[id] == 1 for id in ids(50, "later-"))


def test_a_loop_suspended_while_it_waits_is_right_again_after(queue, spawn, ledger, watching):
    sleeper = spawn()
    watching()
    queue.schedule(b"", id="far", delay=3600)
    sleeper.process.send_signal(signal.SIGSTOP)
    queue.schedule(b"", id="job", delay=0.1)
    time.sleep(0.5)
    resumed = time.time()
    sleeper.resume()
    wait_until(lambda: ledger.ids == ["job"])
    assert ledger.lines[0].at - resumed < 0.5 + allowance()
    sleeper.stop()
