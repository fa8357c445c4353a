"""What only the in-process queue has: get() for consumers, its wake-ups, ManualClock. The verbs: tests/contract."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import random
import time
import weakref
from datetime import datetime, timedelta, timezone

import pytest

import delayadapters
from delayadapters import DelayError, JobExists, ManualClock, MemoryDelayQueue, NewJob, Outcome, State
from delayadapters.clock import SystemClock


@pytest.fixture
def clock():
    return ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))


@pytest.fixture
def queue(clock):
    return MemoryDelayQueue(clock=clock)


async def settle(turns: int = 10) -> None:
    """Lets everything run that can run without the clock moving."""
    for _ in range(turns):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def waiting(queue, count: int = 1):
    """Tasks that wait in get(), each for one job; cancelled at the end."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(queue.get()))
        await settle(2)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def payloads(tasks) -> list[bytes | None]:
    return [task.result().payload if task.done() else None for task in tasks]


# ---------------------------------------------------------------------------------------------------- get()


async def test_get_gives_what_is_due_and_nothing_is_left_to_ack(queue, clock):
    await queue.schedule(b"x", delay=0, id="a", meta={"k": "v"})
    claim = await queue.get()
    assert (claim.id, claim.payload, claim.meta, claim.due) == ("a", b"x", {"k": "v"}, clock.micros)
    stats = await queue.stats()
    assert (stats.waiting, stats.leased) == (0, 0)
    assert await queue.ack([claim]) == 0
    assert await queue.cancel("a") is Outcome.RELEASED


async def test_get_waits_until_due_and_not_a_microsecond_less(queue, clock):
    async with waiting(queue) as (task,):
        await queue.schedule(b"x", delay=10)
        await settle()
        assert not task.done()
        clock.advance(timedelta(seconds=10, microseconds=-1))
        await settle()
        assert not task.done()
        clock.advance(timedelta(microseconds=1))
        await settle()
        assert payloads([task]) == [b"x"]


async def test_tomorrow(queue, clock):
    await queue.schedule(b"x", at=datetime(2030, 1, 2, 12, tzinfo=timezone.utc))
    async with waiting(queue) as (task,):
        clock.advance(timedelta(days=1))
        await settle()
        assert not task.done()
        clock.advance(timedelta(hours=12))
        await settle()
        assert payloads([task]) == [b"x"]


async def test_get_follows_due_order_with_ties_first_scheduled_first(queue, clock):
    at = datetime(2030, 1, 1, 0, 0, 5, tzinfo=timezone.utc)
    await queue.schedule_many([NewJob(b"late", delay=9), *(NewJob(b"%d" % n, at=at) for n in range(1000))])
    clock.advance(9)
    assert [(await queue.get()).payload for _ in range(1001)] == [b"%d" % n for n in range(1000)] + [b"late"]


async def test_a_new_earliest_job_is_delivered_first(queue, clock):
    await queue.schedule(b"far", delay=100)
    async with waiting(queue) as (task,):
        await queue.schedule(b"near", delay=5)
        clock.advance(5)
        await settle()
        assert payloads([task]) == [b"near"]


@pytest.mark.parametrize("verb", ["reschedule", "release_now", "replay", "give_back", "fail", "replace"])
async def test_whatever_makes_a_job_due_reaches_a_waiting_consumer(queue, clock, verb):
    await queue.schedule(b"x", delay=0 if verb in ("replay", "give_back", "fail") else 100, id="a")
    claims = await queue.claim()
    if verb == "replay":
        await queue.fail(claims, "bad", retry_in=None)
    async with waiting(queue) as (task,):
        if verb == "reschedule":
            await queue.reschedule("a", delay=5)
        elif verb == "give_back":
            await queue.give_back(claims)
        elif verb == "fail":
            await queue.fail(claims, "bad", retry_in=5)
        elif verb == "replace":
            await queue.schedule(b"x", delay=5, id="a", if_exists="replace")
        else:
            await getattr(queue, verb)("a")
        clock.advance(5)
        await settle()
        assert payloads([task]) == [b"x"]


async def test_cancel_of_the_head_leaves_a_waiting_consumer_to_the_next(queue, clock):
    await queue.schedule(b"1", delay=1, id="a")
    await queue.schedule(b"2", delay=2, id="b")
    async with waiting(queue) as (task,):
        await queue.cancel("a")
        clock.advance(1)
        await settle()
        assert not task.done()
        clock.advance(1)
        await settle()
        assert payloads([task]) == [b"2"]


async def test_a_lease_that_passes_reaches_a_waiting_consumer(queue, clock):
    await queue.schedule(b"x", delay=0)
    stale = await queue.claim(lease=10)
    async with waiting(queue) as (task,):
        clock.advance(timedelta(seconds=10, microseconds=-1))
        await settle()
        assert not task.done()
        clock.advance(timedelta(microseconds=1))
        await settle()
        assert payloads([task]) == [b"x"]
        assert task.result().requeues == 1
    assert await queue.ack(stale) == 0


async def test_a_renewed_lease_does_not(queue, clock):
    await queue.schedule(b"x", delay=0)
    claims = await queue.claim(lease=10)
    async with waiting(queue) as (task,):
        claims = await queue.renew(claims, lease=60)
        clock.advance(30)
        await settle()
        assert not task.done()
    assert await queue.ack(claims) == 1


async def test_purge_leaves_consumers_waiting(queue, clock):
    await queue.schedule(b"old", delay=1)
    async with waiting(queue) as (task,):
        await queue.purge()
        clock.advance(1)
        await settle()
        assert not task.done()
        await queue.schedule(b"new", delay=0)
        await settle()
        assert payloads([task]) == [b"new"]


# ---------------------------------------------------------------------------------------- several consumers


async def test_one_job_wakes_one_consumer_the_longest_waiting(queue, clock):
    async with waiting(queue, 4) as tasks:
        for n in range(3):
            await queue.schedule(b"%d" % n, delay=n)
        for n in range(3):
            await settle()
            assert payloads(tasks) == [b"%d" % k if k <= n else None for k in range(4)]
            clock.advance(1)


async def test_jobs_due_together_reach_as_many_consumers(queue, clock):
    async with waiting(queue, 5) as tasks:
        await queue.schedule_many([NewJob(b"%d" % n, delay=1) for n in range(4)])
        clock.advance(1)
        await settle(20)
        assert payloads(tasks) == [b"0", b"1", b"2", b"3", None]


async def test_only_one_of_many_consumers_runs_for_one_job():
    """No thundering herd: nine of ten consumers are not even resumed while jobs come and one is delivered."""
    clock = ManualClock()
    resumed = 0

    queue = MemoryDelayQueue(clock=clock)
    expire = queue._entries.expire

    def counting(now):
        nonlocal resumed
        resumed += 1
        expire(now)

    queue._entries.expire = counting
    async with waiting(queue, 10) as tasks:
        before = resumed
        for n in range(50):
            await queue.schedule(b"", delay=100 - n)  # each a new earliest
        await queue.schedule(b"", delay=1000)
        await settle()
        assert resumed == before
        clock.advance(51)
        await settle()
        assert resumed == before + 1
        assert sum(task.done() for task in tasks) == 1


async def test_with_many_consumers_there_is_one_timer():
    queue = MemoryDelayQueue()
    loop = asyncio.get_running_loop()
    calls = []
    original = loop.call_at

    def call_at(when, *args, **kwargs):
        calls.append(when)
        return original(when, *args, **kwargs)

    await queue.schedule(b"", delay=60)
    loop.call_at = call_at  # call_later ends here, too
    try:
        async with waiting(queue, 10):
            assert len(calls) == 1
            await queue.schedule(b"", delay=70)
            assert len(calls) == 1
            await queue.schedule(b"", delay=50)
            assert len(calls) == 2
    finally:
        del loop.call_at


async def test_each_job_reaches_exactly_one_of_several_consumers(queue, clock):
    total, got = 500, []

    async def consume():
        while True:
            got.append((await queue.get()).id)
            if random.random() < 0.3:
                await asyncio.sleep(0)

    consumers = [asyncio.create_task(consume()) for _ in range(7)]
    rnd = random.Random(4)
    for n in range(total):
        await queue.schedule(b"", delay=rnd.random(), id=str(n))
        if n % 50 == 0:
            clock.advance(0.05)
            await settle(1)
    clock.advance(2)
    while len(got) < total:
        await asyncio.sleep(0)
    await settle()
    assert sorted(got, key=int) == [str(n) for n in range(total)]
    for task in consumers:
        task.cancel()


# --------------------------------------------------------------------------------------------- cancellation


async def test_a_cancelled_get_loses_nothing(queue, clock):
    await queue.schedule(b"x", delay=1)
    async with waiting(queue) as (task,):
        task.cancel()
        await settle()
        assert task.cancelled()
    clock.advance(1)
    assert (await queue.get()).payload == b"x"


async def test_a_call_to_a_consumer_cancelled_in_the_same_turn_goes_to_the_next(queue, clock):
    async with waiting(queue, 3) as tasks:
        await queue.schedule(b"x", delay=1)
        clock.advance(1)  # the first consumer is called
        tasks[0].cancel()  # and never comes
        await settle()
        assert tasks[0].cancelled()
        assert payloads(tasks[1:]) == [b"x", None]


async def test_a_consumer_cancelled_before_the_call_is_passed_over(queue, clock):
    async with waiting(queue, 3) as tasks:
        await queue.schedule(b"x", delay=1)
        tasks[0].cancel()
        clock.advance(1)  # its task has not run since
        await settle()
        assert payloads(tasks[1:]) == [b"x", None]


async def test_all_called_consumers_cancelled_and_a_later_one_gets_it(queue, clock):
    async with waiting(queue, 3) as tasks:
        await queue.schedule(b"x", delay=1)
        clock.advance(1)
        for task in tasks:
            task.cancel()
        await settle()
    assert (await queue.stats()).waiting == 1
    assert (await asyncio.wait_for(queue.get(), 5)).payload == b"x"


async def test_a_called_consumer_that_finds_nothing_keeps_its_place(queue, clock):
    async with waiting(queue, 2) as tasks:
        await queue.schedule(b"1", delay=1, id="a")
        clock.advance(1)  # the first is called
        assert await queue.cancel("a") is Outcome.CANCELLED
        await settle()
        assert not tasks[0].done()
        await queue.schedule(b"2", delay=0)
        await settle()
        assert payloads(tasks) == [b"2", None]


async def test_time_outs_around_get_lose_nothing():
    queue = MemoryDelayQueue()
    got, total = [], 60

    async def consume():
        while len(got) < total:
            with contextlib.suppress(asyncio.TimeoutError):
                got.append((await asyncio.wait_for(queue.get(), 0.001)).id)

    for n in range(total):
        await queue.schedule(b"", delay=n / 2000, id=str(n))
    await asyncio.wait_for(asyncio.gather(*[consume() for _ in range(3)]), 20)
    assert sorted(got, key=int) == [str(n) for n in range(total)]


@pytest.mark.parametrize("seed", range(20))
async def test_random_cancellations_lose_and_double_nothing(queue, clock, seed):
    rnd = random.Random(seed)
    total, got, tasks = 60, [], []

    async def consume():
        got.append((await queue.get()).id)

    for n in range(total):
        await queue.schedule(b"", delay=rnd.randrange(5), id=str(n))
        tasks += [asyncio.create_task(consume()) for _ in range(rnd.randrange(3))]
        if rnd.random() < 0.3:
            await settle(rnd.randrange(3))
        if rnd.random() < 0.3:
            clock.advance(rnd.randrange(3))
        if tasks and rnd.random() < 0.5:
            rnd.choice(tasks).cancel()
    clock.advance(10)
    while len(got) < total:
        tasks += [asyncio.create_task(consume())]
        await settle(3)
    assert sorted(got, key=int) == [str(n) for n in range(total)]
    for task in tasks:
        task.cancel()


async def test_time_outs_leave_no_trace_of_consumers(queue):
    for _ in range(50):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get(), 0)
    async with waiting(queue, 5) as tasks:
        for task in tasks:
            task.cancel()
        await settle()
    assert len(queue._consumers) == 0


async def test_no_timer_is_left_without_a_consumer():
    queue = MemoryDelayQueue()
    await queue.schedule(b"", delay=60)
    async with waiting(queue):
        assert queue._timer is not None
    assert queue._timer is None


# ------------------------------------------------------------------------------------------------ real time


async def test_real_time_is_never_early():
    queue = MemoryDelayQueue()
    rnd = random.Random(1)
    due = {}
    for n in range(40):
        delay = rnd.random() / 30
        begun = time.monotonic_ns()
        await queue.schedule(b"", delay=delay, id=str(n))
        due[str(n)] = begun + round(delay * 1_000_000) * 1000
    for _ in range(40):
        claim = await asyncio.wait_for(queue.get(), 10)
        assert time.monotonic_ns() >= due[claim.id]


async def test_a_timer_that_fires_early_is_set_again(monkeypatch):
    """uvloop's timers count in milliseconds and may fire up to one too early."""
    queue = MemoryDelayQueue()
    loop = asyncio.get_running_loop()
    original = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda delay, *args, **kw: original(max(delay - 0.005, 0), *args, **kw), raising=False
    )
    begun = time.monotonic_ns()
    await queue.schedule(b"", delay=0.02)
    await asyncio.wait_for(queue.get(), 10)
    assert time.monotonic_ns() - begun >= 20_000_000


async def test_an_absolute_time_in_real_time():
    queue = MemoryDelayQueue()
    at = datetime.now(timezone.utc) + timedelta(milliseconds=20)
    job = await queue.schedule(b"", at=at)
    assert job.due_at == at
    await asyncio.wait_for(queue.get(), 10)
    assert datetime.now(timezone.utc) >= at - timedelta(microseconds=1)


async def test_a_delay_and_the_due_time_it_gave_are_a_tie():
    queue = MemoryDelayQueue()
    jobs = [await queue.schedule(b"0", delay=3600)]
    for n in range(1, 20):
        jobs.append(await queue.schedule(b"%d" % n, at=jobs[0].due_at))
    assert len({job.due for job in jobs}) == 1
    assert [job.payload for job in (await queue.jobs()).jobs] == [b"%d" % n for n in range(20)]


async def test_no_delay_is_due_at_once():
    queue = MemoryDelayQueue()
    for n in range(200):
        await queue.schedule(b"", delay=0, id=str(n))
        assert len(await queue.claim()) == 1


async def test_a_wall_clock_that_is_set_moves_no_job_but_counts_for_absolute_times(monkeypatch):
    queue = MemoryDelayQueue()
    before = await queue.schedule(b"before", delay=0.02, id="before")
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
    at = datetime.fromtimestamp(real() / 1e9 + 3600.01, timezone.utc)
    after = await queue.schedule(b"after", at=at, id="after")
    assert after.due_at == at
    claims = [await asyncio.wait_for(queue.get(), 10) for _ in range(2)]
    assert {claim.id: claim.due for claim in claims} == {"before": before.due, "after": after.due}


async def test_setting_the_wall_clock_back_moves_no_job(monkeypatch):
    queue = MemoryDelayQueue()
    await queue.schedule(b"x", delay=0.01)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
    assert (await asyncio.wait_for(queue.get(), 10)).payload == b"x"


async def test_a_producer_in_a_tight_loop_does_not_hold_up_a_consumer():
    """schedule never needs to wait for anything, so without giving way the loop below would never let go."""
    queue = MemoryDelayQueue()
    async with waiting(queue) as (task,):
        await queue.schedule(b"due", delay=0.001, id="due")
        end = time.monotonic() + 10
        while not task.done() and time.monotonic() < end:
            await queue.schedule(b"", delay=1000)
        assert payloads([task]) == [b"due"]


async def test_a_producer_cancelled_while_it_gives_way_has_stored_nothing(queue, clock):
    async with waiting(queue):
        await queue.schedule(b"x", delay=1)
        producer = asyncio.create_task(queue.schedule(b"y", delay=5, id="y"))
        clock.advance(1)  # a consumer is called, whose turn is after the producer's: schedule gives way to it
        await asyncio.sleep(0)
        producer.cancel()
        await settle()
        assert producer.cancelled()
        assert await queue.get("y") is None


# --------------------------------------------------------------------------------------------- stale places


async def test_stale_places_do_not_pile_up(queue):
    await queue.schedule(b"x", delay=1000, id="a")
    for n in range(5000):
        await queue.reschedule("a", delay=1000 + n)
        await queue.schedule(b"", delay=2000, id="b")
        await queue.cancel("b")
    assert queue._entries.places < 200
    assert [job.id for job in (await queue.jobs()).jobs] == ["a"]


async def test_stale_leases_do_not_pile_up(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim(lease=30)
    for _ in range(2000):
        clock.advance(1)
        claims = await queue.renew(claims, lease=30)
    assert queue._entries.places < 200
    assert await queue.ack(claims) == 1


async def test_sweeping_keeps_order_and_loses_nothing(queue, clock):
    rnd = random.Random(6)
    expected = {}
    for n in range(2000):
        await queue.schedule(b"", delay=rnd.randrange(1, 500), id=str(n))
    for n in range(2000):
        if rnd.random() < 0.7:
            await queue.cancel(str(n))
        else:
            delay = rnd.randrange(1, 500)
            await queue.reschedule(str(n), delay=delay)
            expected[str(n)] = (delay, n)
    clock.advance(500)
    got = [(await queue.get()).id for _ in range(len(expected))]
    assert got == sorted(expected, key=expected.get)
    assert (await queue.stats()).waiting == 0


async def test_nothing_is_kept_of_jobs_that_are_gone(queue, clock):
    for n in range(3000):
        await queue.schedule(b"", delay=0, id=str(n))
    claims = await queue.claim(1000)
    await queue.ack(claims[:500])
    await queue.fail(claims[500:], "bad", retry_in=None)
    for job in (await queue.dead_jobs(limit=1000)).jobs:
        await queue.discard(job.id)
    while (await queue.stats()).waiting:
        await queue.get()
    assert not queue._entries.leased
    assert not queue._entries.dead
    assert not any(queue._entries.known(str(n)) for n in range(3000))
    assert queue._entries.places < 2100
    await queue.purge()
    assert not queue._released


async def test_released_ids_are_remembered_up_to_a_bound(queue):
    for start in range(0, 21_000, 1000):
        await queue.schedule_many([NewJob(b"", delay=0, id=str(n)) for n in range(start, start + 1000)])
        await queue.ack(await queue.claim(1000))
    assert len(queue._released) <= 10_000
    assert await queue.cancel("20999") is Outcome.RELEASED
    assert await queue.cancel("11000") is Outcome.RELEASED
    assert await queue.cancel("10999") is Outcome.NOT_FOUND


async def test_one_id_released_again_and_again_is_remembered_once(queue):
    for _ in range(5):
        await queue.schedule(b"", delay=0, id="a")
        await queue.get()
    assert list(queue._released) == ["a"]


# --------------------------------------------------------------------------------------------------- fences


async def test_a_claim_taken_twice_in_one_microsecond_has_two_fences(queue):
    await queue.schedule(b"x", delay=0)
    stale = await queue.claim(lease=10)
    await queue.give_back(stale)
    fresh = await queue.claim(lease=10)
    assert await queue.ack(stale) == 0
    assert await queue.ack(fresh) == 1


# -------------------------------------------------------------------------------------------------- closing


async def test_close_ends_waiting_and_later_consumers(queue):
    async with waiting(queue, 3) as tasks:
        await queue.aclose()
        await settle()
        for task in tasks:
            with pytest.raises(DelayError, match="closed"):
                await task
    with pytest.raises(DelayError, match="closed"):
        await queue.get()


async def test_a_closed_queue_takes_nothing_but_shows_what_is_left(queue):
    await queue.schedule(b"x", delay=0, id="a")
    queue.close()
    queue.close()
    with pytest.raises(DelayError, match="closed"):
        await queue.schedule(b"y", delay=0)
    with pytest.raises(DelayError, match="closed"):
        await queue.schedule_many([NewJob(b"y", delay=0)])
    assert (await queue.get("a")).state is State.WAITING
    assert [claim.payload for claim in await queue.claim()] == [b"x"]


async def test_the_context_manager_closes(clock):
    async with MemoryDelayQueue(clock=clock) as queue:
        await queue.schedule(b"x", delay=0)
        assert (await queue.get()).payload == b"x"
    with pytest.raises(DelayError):
        await queue.get()


def test_a_queue_may_be_used_by_one_loop_after_another():
    queue = MemoryDelayQueue()

    async def wait_in_vain():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get(), 0.001)

    async def wait():
        return (await asyncio.wait_for(queue.get(), 10)).payload

    async def schedule():
        await queue.schedule(b"x", delay=0.01)

    asyncio.run(schedule())
    asyncio.run(wait_in_vain())
    assert asyncio.run(wait()) == b"x"


# -------------------------------------------------------------------------------------- differences to Redis


async def test_a_direct_release_is_refused_by_name(queue):
    with pytest.raises(TypeError, match="release"):
        await queue.schedule(b"x", delay=1, release=[("LPUSH", "q", "x")])
    with pytest.raises(TypeError, match="release"):
        await queue.schedule_many([NewJob(b"ok", delay=1), NewJob(b"x", delay=1, release=[])])
    assert (await queue.stats()).waiting == 0


async def test_a_batch_of_any_size_is_stored_whole_or_not_at_all(queue):
    await queue.schedule(b"", delay=1, id="1999")
    with pytest.raises(JobExists):
        await queue.schedule_many([NewJob(b"", delay=1, id=str(n)) for n in range(2000)])
    assert (await queue.stats()).waiting == 1


def test_the_verbs_have_the_arguments_of_the_redis_queue():
    looking = ["jobs", "dead_jobs", "stats", "aclose"]
    consuming = ["claim", "ack", "give_back", "fail", "renew"]
    others = ["schedule", "schedule_many", "cancel", "reschedule", "release_now", "replay", "discard", "purge"]
    for verb in [*looking, *consuming, *others]:
        ours = inspect.signature(getattr(MemoryDelayQueue, verb))
        theirs = inspect.signature(getattr(delayadapters.AsyncDelayQueue, verb))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), verb


# --------------------------------------------------------------------------------------------------- clocks


def test_a_manual_clock_starts_where_it_is_told():
    assert ManualClock(5)() == 5.0
    assert ManualClock(datetime(1970, 1, 1, 1, tzinfo=timezone.utc)).micros == 3_600_000_000
    assert abs(ManualClock()() - time.time()) < 60
    for bad, error in ((datetime(2030, 1, 1), ValueError), ("now", TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match="start"):
            ManualClock(bad)


def test_a_manual_clock_moves_exactly():
    clock = ManualClock(datetime(2250, 1, 1, tzinfo=timezone.utc))
    start = clock.micros
    for _ in range(1000):
        clock.advance(timedelta(microseconds=1))
    clock.advance(0.1)
    clock.advance(-0.001)
    assert clock.micros == start + 100_000
    for bad, error in ((float("inf"), ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="seconds"):
            clock.advance(bad)
    assert clock.micros == start + 100_000


async def test_a_manual_clock_tells_every_queue_on_it(clock):
    queues = [MemoryDelayQueue(clock=clock) for _ in range(3)]
    for queue in queues:
        await queue.schedule(b"x", delay=5)
    tasks = [asyncio.create_task(queue.get()) for queue in queues]
    await settle()
    clock.advance(5)
    await settle()
    assert payloads(tasks) == [b"x"] * 3


async def test_a_manual_clock_keeps_no_queue_alive(clock):
    queue = MemoryDelayQueue(clock=clock)
    reference = weakref.ref(queue)
    del queue
    gc.collect()
    assert reference() is None
    clock.advance(1)
    clock.advance(1)


async def test_a_manual_clock_set_back_holds_jobs_up(queue, clock):
    await queue.schedule(b"x", delay=5)
    async with waiting(queue) as (task,):
        clock.advance(-60)
        clock.advance(64)
        await settle()
        assert not task.done()
        clock.advance(1)
        await settle()
        assert payloads([task]) == [b"x"]


async def test_nothing_waits_in_real_time_on_a_manual_clock(queue):
    await queue.schedule(b"x", delay=0.000001)
    async with waiting(queue) as (task,):
        await asyncio.sleep(0.01)
        assert not task.done()


async def test_any_callable_is_a_clock_that_runs_in_real_time():
    offset = -20_000_000.0
    queue = MemoryDelayQueue(clock=lambda: time.monotonic() - offset)
    begun = time.monotonic()
    await queue.schedule(b"x", delay=0.01)
    await asyncio.wait_for(queue.get(), 10)
    assert time.monotonic() - begun >= 0.00999


def test_the_system_clock_counts_from_the_wall_clock():
    clock = SystemClock()
    wall = time.time_ns() // 1000
    assert abs(clock.now() - wall) < 1_000_000
    assert clock.shift() == 0
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)
    assert all(clock.now() <= clock.start() for _ in range(100))
