"""What a queue remembers beside its jobs is bounded, and ends."""

from __future__ import annotations

import itertools

import pytest

from delayadapters import JobExists, NewJob, Outcome
from delayadapters.redis import commands
from delayadapters.redis.commands import Asker
from delayadapters.redis.sync import execute
from delaytests import count_commands
from delaytests.raw import content, keys_of, send

MINUTE = 60


@pytest.fixture
def queue(make_queue, clock):
    return make_queue(clock=clock)


def fill(client, key, count, now):
    """``count`` answered calls, as if made at ``now``."""
    for at in range(0, count, 5000):
        client.hset(key, mapping={b"%016d" % n: b"x" for n in range(at, min(count, at + 5000))})
    client.hset(key, b"", now)


# -------------------------------------------------------------------------------------------------------------- calls


def test_a_call_is_remembered_for_five_minutes_at_least(queue, redis_client, clock):
    keys = keys_of(queue)
    stored = [queue._verbs.new_job(NewJob(b"x", 3600, id="a"), clock())]
    call = commands.schedule(keys, stored, "error", clock())
    first = send(redis_client, call)
    for _ in range(29):
        clock.advance(10)
        queue.schedule(b"y", delay=3600)
    assert send(redis_client, call) == first
    assert queue.stats().waiting == 30


def test_calls_are_forgotten_after_two_generations(queue, redis_client, clock):
    keys = keys_of(queue)
    for _ in range(100):
        queue.schedule(b"x", delay=0)
        queue.ack(queue.claim())
        clock.advance(10)
    # 300 s a generation at one call in 5 s: what is kept does not grow with time.
    assert redis_client.hlen(keys.calls) <= 64
    assert redis_client.hlen(keys.calls_old) <= 64


def test_many_calls_shorten_the_memory_to_half_a_minute(queue, redis_client, clock):
    keys = keys_of(queue)
    queue.schedule(b"x", delay=3600)
    fill(redis_client, keys.calls, 100_001, clock())
    clock.advance(29)
    queue.schedule(b"x", delay=3600)
    assert redis_client.hlen(keys.calls) > 100_000
    clock.advance(2)
    queue.schedule(b"x", delay=3600)
    assert redis_client.hlen(keys.calls_old) > 100_000
    queue.schedule(b"x", delay=3600)
    assert redis_client.hlen(keys.calls) == 3
    clock.advance(301)
    queue.schedule(b"x", delay=3600)
    queue.schedule(b"x", delay=3600)
    assert redis_client.hlen(keys.calls_old) < 10


def test_calls_end_by_themselves(queue, redis_client, clock):
    keys = keys_of(queue)
    queue.schedule(b"x", delay=3600)
    assert 655_000 < redis_client.pttl(keys.calls) <= 660_000
    clock.advance(301)
    queue.schedule(b"x", delay=3600)
    queue.schedule(b"x", delay=3600)
    assert 0 < redis_client.pttl(keys.calls_old) <= 660_000
    assert 0 < redis_client.pttl(keys.calls) <= 660_000


def test_a_clock_set_back_keeps_the_memory(queue, redis_client, clock):
    keys = keys_of(queue)
    queue.schedule(b"x", delay=3600)
    clock.advance(-86_400)
    for _ in range(5):
        queue.schedule(b"x", delay=3600)
    assert redis_client.hlen(keys.calls) == 7


def test_what_changes_nothing_is_not_remembered(queue, redis_client, clock):
    keys = keys_of(queue)
    queue.cancel("nobody")
    queue.reschedule("nobody", delay=1)
    queue.replay("nobody")
    queue.discard("nobody")
    queue.get("nobody")
    queue.claim()
    assert content(redis_client, keys.calls) is None


# ----------------------------------------------------------------------------------------------------------- released


def release(queue, ids):
    queue.schedule_many([NewJob(b"", 0, id=id) for id in ids])
    while claims := queue.claim(1000):
        assert queue.ack(claims) == len(claims)


def test_ten_thousand_released_ids_are_remembered_and_not_much_more(queue, redis_client):
    keys = keys_of(queue)
    for at in range(0, 24_000, 4000):
        release(queue, [f"j{n}" for n in range(at, at + 4000)])
        sizes = redis_client.scard(keys.released), redis_client.scard(keys.released_old)
        assert max(sizes) <= 11_000
    for n in (23_999, 20_000, 14_001):
        assert queue.cancel(f"j{n}") is Outcome.RELEASED
    assert queue.cancel("j0") is Outcome.NOT_FOUND


NOTHING = [("DEL", "nothing")]


def release_many(queue, ids):
    """In batches of hundreds, as a drain does."""
    queue.schedule_many([NewJob(b"", 0, id=id, release=NOTHING) for id in ids])
    while queue.stats().due:
        assert queue.claim(500) == []


def test_of_those_released_many_at_once_ten_thousand_are_remembered_too(queue, redis_client):
    keys = keys_of(queue)
    for at in range(0, 24_000, 4000):
        release_many(queue, [f"j{n}" for n in range(at, at + 4000)])
        assert redis_client.llen(keys.released_new) <= 10_000
    assert 3_590_000 < redis_client.pttl(keys.released_new) <= 3_600_000
    for n in (23_999, 20_000, 14_001):
        assert queue.cancel(f"j{n}") is Outcome.RELEASED
        assert queue.reschedule(f"j{n}", delay=1) is Outcome.RELEASED
    assert queue.cancel("j0") is Outcome.NOT_FOUND


def test_questions_empty_the_list_and_nothing_is_forgotten_by_it(queue, redis_client):
    keys = keys_of(queue)
    ids = [f"j{n}" for n in range(1000)]
    release_many(queue, ids)
    for left in (750, 500, 250, 0, 0):
        assert queue.cancel("nobody") is Outcome.NOT_FOUND
        assert redis_client.llen(keys.released_new) == left
    assert redis_client.scard(keys.released) == 1000
    assert all(queue.cancel(id) is Outcome.RELEASED for id in ids[::50])


def test_a_new_job_of_an_id_released_with_many_is_cancelled_as_such(queue):
    release_many(queue, [f"j{n}" for n in range(600)])
    for id in ("j0", "j599"):
        queue.schedule(b"", delay=5, id=id)
        assert queue.cancel(id) is Outcome.CANCELLED
        assert queue.cancel(id) is Outcome.NOT_FOUND
    assert queue.cancel("j1") is queue.cancel("j598") is Outcome.RELEASED


def test_released_ids_are_forgotten_an_hour_after_the_last_release(queue, redis_client):
    keys = keys_of(queue)
    release(queue, ["a"])
    assert 3_590_000 < redis_client.pttl(keys.released) <= 3_600_000
    redis_client.pexpire(keys.released, 5000)
    release(queue, ["b"])
    assert redis_client.pttl(keys.released) > 3_590_000, "the last release counts, not the first"
    assert queue.cancel("a") is Outcome.RELEASED


def test_a_new_job_of_a_released_id_is_cancelled_as_such(queue):
    release(queue, ["a"])
    queue.schedule(b"", delay=5, id="a")
    assert queue.cancel("a") is Outcome.CANCELLED
    assert queue.cancel("a") is Outcome.NOT_FOUND


# -------------------------------------------------------------------------------------------------------------- loops


def test_loops_that_were_killed_are_struck_off(queue, redis_client, clock):
    keys = keys_of(queue)
    calls = itertools.count(1)
    for day in range(30):
        asker = Asker.new(f"killed on day {day}")
        send(redis_client, commands.claim(keys, asker, next(calls), lease=10**6, limit=1, watch_ms=1000, now=clock()))
        redis_client.delete(keys.watch)
        clock.advance(86_400)
    assert redis_client.hlen(keys.loops) <= 10


def test_consumers_that_claim_once_do_not_add_up(make_queue, redis_client, clock):
    """Every process that claims has a name of its own; none of them takes the watch."""
    for _ in range(150):
        queue = make_queue(clock=clock)
        queue.claim()
        clock.advance(3600)
    assert redis_client.hlen(keys_of(queue).loops) <= 40


def test_consumers_are_struck_off_minutes_after_their_last_lease(make_queue, redis_client, clock):
    """Unlike a release loop they never say that they leave."""
    queue = make_queue(clock=clock)
    queue.schedule(b"", delay=0)
    assert len(queue.claim(lease=3600)) == 1
    [first] = redis_client.hkeys(keys_of(queue).loops)
    for _ in range(50):
        with make_queue(clock=clock) as other:
            assert other.claim() == []
        clock.advance(60)
    names = redis_client.hkeys(keys_of(queue).loops)
    assert len(names) <= 12
    assert first in names, "it has a lease"


def test_a_purged_queue_leaves_nothing(queue, redis_client):
    release(queue, ["a", "b"])
    queue.schedule(b"", delay=5, id="c")
    queue.purge()
    assert redis_client.dbsize() == 0


def test_kept_jobs_are_not_remembered_with_the_answer(make_queue, redis_client):
    """A resync that finds everything there would otherwise store it all again, for minutes."""
    queue = make_queue()
    queue.schedule_many([NewJob(b"p" * 30_000, 60, id=f"{n}") for n in range(50)])
    calls = keys_of(queue).calls
    before = redis_client.memory_usage(calls, samples=0)
    steps = queue._verbs.schedule_many([NewJob(b"q", 60, id=f"{n}") for n in range(51)], "keep")
    request = next(steps)
    answer = request.parse(execute(redis_client, request))
    assert [job.outcome for job in answer] == [Outcome.KEPT] * 50 + [Outcome.SCHEDULED]
    assert redis_client.memory_usage(calls, samples=0) - before < 20_000
    # Repeated, the call has the same answer, the kept payloads included.
    assert request.parse(execute(redis_client, request)) == answer
    assert answer[0].payload == b"p" * 30_000


@pytest.mark.parametrize("mode", ["error", "keep", "replace", "add"])
def test_ids_with_large_payloads_are_scheduled_again_a_few_at_a_time(make_queue, redis_client, mode):
    """Their records are read to see what is there: all of them in one script would stall Redis."""
    queue = make_queue()
    large = [NewJob(bytes([n]) * 1_000_000, 60, id=f"{n}") for n in range(24)]
    queue.schedule_many(large)
    again = [NewJob(b"small", 90, id=f"new-{n}") for n in range(100)] + [NewJob(b"q", 90, id=job.id) for job in large]
    with count_commands(redis_client) as commands:
        if mode == "error":
            with pytest.raises(JobExists) as taken:
                queue.schedule_many(again, if_exists=mode)
            assert set(taken.value.ids) <= {job.id for job in large}
        else:
            jobs = queue.schedule_many(again, if_exists=mode)
            outcome = {"keep": Outcome.KEPT, "replace": Outcome.REPLACED, "add": Outcome.SCHEDULED}[mode]
            assert [job.outcome for job in jobs] == [Outcome.SCHEDULED] * 100 + [outcome] * 24
            assert [job.id for job in jobs] == [job.id for job in again]
            kept = large if mode == "keep" else again[100:]
            assert [job.payload for job in jobs[100:]] == [job.payload for job in kept]
    asked = commands["evalsha"] + commands["eval"]
    assert asked >= (2 if mode == "error" else 5)
    if mode != "error":
        assert queue.stats().waiting == (148 if mode == "add" else 124)


def test_a_page_of_many_rows_is_read_a_few_at_a_time(make_queue, redis_client):
    queue = make_queue()
    queue.schedule_many([NewJob(b"x" * 50, 60) for _ in range(3000)])
    with count_commands(redis_client) as commands:
        page = queue.jobs(limit=2500)
    assert len(page.jobs) == 2500
    assert len({job.id for job in page.jobs}) == 2500
    assert commands["evalsha"] + commands["eval"] >= 10  # no script reads more than a few hundred rows
    assert len(queue.jobs(limit=2500, cursor=page.cursor).jobs) == 500
