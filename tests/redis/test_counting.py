"""counters() and loops(): what Redis knows of what was ever done, and by whom."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import delayadapters
from delayadapters import Counters, NewJob, Payload, Releaser
from delayadapters.jobs import ALIVE, BEAT, LATENESS_BOUNDS
from delayadapters.redis import commands
from delayadapters.redis.commands import LATE_COUNTS, Asker
from delayadapters.release.observing import lateness_of, to_count
from delaytests import wait_until
from delaytests.queues import AsyncFace
from delaytests.raw import keys_of, send

LUA = Path(delayadapters.__file__).parent / "redis" / "lua" / "include" / "lateness.lua"


@pytest.fixture(params=["sync", "async"])
def queue(request, redis_server, clock):
    if request.param == "sync":
        return AsyncFace(request.getfixturevalue("make_queue")(clock=clock))
    return request.getfixturevalue("make_async_queue")(clock=clock)


def direct(id: str, broker: bytes, verb: str = "LPUSH") -> NewJob:
    return NewJob(b"x", delay=0, id=id, release=[(verb, broker, Payload.BYTES)])


async def test_a_new_queue_has_counted_nothing(queue):
    assert await queue.counters() == Counters()
    assert (await queue.counters()).lateness.count == 0


async def test_every_verb_is_counted_once(queue, clock):
    await queue.schedule_many([NewJob(b"", 5, id=f"{n}") for n in range(10)])
    await queue.schedule(b"", delay=5, id="0", if_exists="replace")
    await queue.schedule(b"", delay=5, id="1", if_exists="keep")
    await queue.cancel("2")
    await queue.cancel("2")
    await queue.reschedule("3", delay=1)
    await queue.release_now("4")
    clock.advance(5)
    claims = await queue.claim()
    assert len(claims) == 9
    assert await queue.ack(claims[:4]) == 4
    assert await queue.ack(claims[:4]) == 0
    assert await queue.give_back(claims[4:5]) == 1
    assert await queue.fail(claims[5:6], "why", retry_in=60) == 1
    assert await queue.fail(claims[6:8], "why", retry_in=None) == 2
    assert await queue.replay(claims[6].id) is not None
    await queue.discard(claims[7].id)
    clock.advance(31)
    await queue.claim()
    seen = await queue.counters()
    assert seen == Counters(
        scheduled=11,
        replaced=1,
        cancelled=1,
        rescheduled=2,
        released=4,
        requeued=1,
        given_back=1,
        failed=3,
        dead=2,
        replayed=1,
        discarded=1,
        lateness=seen.lateness,
    )
    await queue.purge()
    assert await queue.counters() == Counters()


@pytest.mark.parametrize("late", [0, 0.0005, 0.0006, 0.02, 0.6, 4, 299, 301, 86_400])
async def test_lateness_falls_into_its_bucket(queue, clock, redis_client, late):
    broker = keys_of(queue).due + b":broker"
    await queue.schedule(b"", delay=1, id="leased")
    await queue.schedule_many([NewJob(b"x", delay=1, id="direct", release=[("LPUSH", broker, "x")])])
    clock.advance(1 + late)
    assert await queue.ack(await queue.claim()) == 1
    redis_client.delete(broker)
    seen = await queue.counters()
    assert (seen.released, seen.direct) == (2, 1)
    assert seen.lateness.sum == pytest.approx(2 * late)
    bucket = next((i for i, bound in enumerate(LATENESS_BOUNDS) if late <= bound), len(LATENESS_BOUNDS))
    assert [i for i, count in enumerate(seen.lateness.counts) if count] == [bucket]
    assert seen.lateness.count == 2


async def test_direct_releases_that_fail_are_not_released_and_not_late(queue, clock, redis_client):
    broker = keys_of(queue).due + b":broker"
    redis_client.set(broker, "no list")
    await queue.schedule_many([direct(f"{n}", broker) for n in range(3)])
    await queue.schedule_many([direct("other", broker, "RPUSH")])
    assert await queue.claim() == []
    redis_client.delete(broker)
    seen = await queue.counters()
    assert (seen.released, seen.failed, seen.dead, seen.lateness.count, seen.lateness.sum) == (0, 4, 0, 0, 0)
    clock.advance(10)
    await queue.claim()
    redis_client.delete(broker)
    seen = await queue.counters()
    assert (seen.released, seen.direct, seen.lateness.count) == (4, 4, 4)
    assert seen.lateness.sum == pytest.approx(40)


def test_the_bounds_are_the_same_in_the_script():
    text = re.search(r"local BOUNDS = \{(.*?)\}", LUA.read_text(), re.DOTALL)
    assert text is not None
    assert [int(word) for word in re.findall(r"\d+", text[1])] == [round(bound * 1e6) for bound in LATENESS_BOUNDS]


def test_a_batch_is_measured_like_one_job_after_the_other():
    chance = random.Random(7)
    now = 10**15
    for size in (0, 1, 2, 100):
        dues = [now - round(10 ** chance.uniform(-1, 9)) + 3 for _ in range(size)]
        late = lateness_of(dues, now)
        assert sum(one.jobs for one in late) == size
        one_by_one: dict[str, int] = {}
        for due in dues:
            one_by_one = to_count(lateness_of([due], now), one_by_one)
        together = to_count(late)
        for name in LATE_COUNTS:
            assert together.get(name, 0) == one_by_one.get(name, 0)
        assert together.get("late:sum", 0) == pytest.approx(one_by_one.get("late:sum", 0), abs=3 * size)


def test_a_repeated_request_counts_once(make_queue, redis_client):
    """redis-py sends a request again when its answer was lost."""
    queue = make_queue()
    keys, asker = keys_of(queue), Asker.new()
    queue.schedule(b"", delay=0, id="leased")
    queue.schedule(b"", delay=9, id="a")
    queue.schedule_many([NewJob(b"", 0, id="d", release=[("SET", keys.due + b":broker", "x")])])
    new = queue._verbs.new_job(NewJob(b"", 5, id="new"), 0)
    store = commands.schedule(keys, [new], "replace")
    claim = commands.claim(keys, asker, 1, lease=30_000_000, limit=100)
    requests = [store, commands.cancel(keys, b"a"), claim]
    for request in requests:
        for _ in range(3):
            answer = send(redis_client, request)
    acks = [one.entry for one in answer.claims]
    ack = commands.claim(
        keys,
        asker,
        2,
        lease=30_000_000,
        limit=0,
        fence=answer.lease,
        acks=acks,
        late={LATE_COUNTS[0]: 1, "late:sum": 7},
    )
    for _ in range(3):
        send(redis_client, ack)
    send(redis_client, claim)  # a copy that a slow network brings late
    redis_client.delete(keys.due + b":broker")
    seen = queue.counters()
    assert (seen.scheduled, seen.cancelled, seen.released, seen.direct) == (4, 1, 2, 1)
    assert seen.lateness.count == 2


def test_what_was_counted_adds_up(make_queue, redis_client, clock):
    """Every entry that was scheduled is somewhere."""
    chance = random.Random(3)
    queue = make_queue(clock=clock, shards=2)
    broker = keys_of(queue).due + b":broker"
    held = []
    for _ in range(400):
        id = f"{chance.randrange(12)}"
        verb = chance.randrange(11)
        if verb < 3:
            mode = chance.choice(["add", "keep", "replace"])
            release = [("LPUSH" if chance.random() < 0.7 else "HSET", broker, "x")] if chance.random() < 0.4 else None
            queue.schedule(b"", delay=chance.random(), id=id, if_exists=mode, release=release)
        elif verb == 3:
            queue.cancel(id)
        elif verb == 4:
            queue.reschedule(id, delay=chance.random())
        elif verb == 5:
            clock.advance(chance.choice([0.1, 1, 40]))
        elif verb == 6:
            held += queue.claim(chance.randrange(1, 5), lease=chance.choice([1, 30]))
        elif verb == 7 and held:
            queue.ack([held.pop()])
        elif verb == 8 and held:
            queue.fail([held.pop()], "why", retry_in=chance.choice([None, 1]))
        elif verb == 9:
            chance.choice([queue.replay, queue.discard])(id)
        elif verb == 10 and held:
            queue.give_back([held.pop()])
        seen, stats = queue.counters(), queue.stats()
        gone = seen.released + seen.cancelled + seen.replaced + seen.discarded + seen.dropped
        assert seen.scheduled == stats.waiting + stats.leased + stats.dead + gone
        assert seen.lateness.count == seen.released
    redis_client.delete(broker)
    assert min(seen.released, seen.direct, seen.requeued, seen.failed, seen.dead, seen.replaced) > 0


# -------------------------------------------------------------------------------------------------------------- loops


class Nothing:
    def publish(self, claims):
        return None


async def test_a_queue_without_loops_has_none(queue):
    assert await queue.loops() == []


async def test_loops_are_told_by_name_age_and_watch(queue, clock, redis_client):
    keys = keys_of(queue)
    for call, name in enumerate(("first one", "second"), 1):
        claim = commands.claim(keys, Asker.new(name), call, lease=10**6, limit=1, watch_ms=60_000, now=clock())
        send(redis_client, claim)
        clock.advance(30)
    (second, first) = await queue.loops()
    assert (first.name, first.seen_ago, first.watching, first.shard) == ("first one", 60, True, 0)
    assert (second.name, second.seen_ago, second.watching) == ("second", 30, False)
    assert second.alive
    assert not first.alive
    assert BEAT * 2 < ALIVE


async def test_a_sign_of_life_makes_a_loop_young_again_and_a_late_one_does_not_make_it_old(queue, clock, redis_client):
    keys, asker = keys_of(queue), Asker.new("me")
    began = clock()
    send(redis_client, commands.claim(keys, asker, 1, lease=10**6, limit=1, watch_ms=1000, now=began))
    clock.advance(50)
    send(redis_client, commands.probe(keys, asker, beat=clock()))
    assert [loop.seen_ago for loop in await queue.loops()] == [0]
    send(redis_client, commands.claim(keys, asker, 2, lease=10**6, limit=1, watch_ms=1000, now=clock()))
    send(redis_client, commands.probe(keys, asker, beat=began))
    assert [loop.seen_ago for loop in await queue.loops()] == [0]
    send(redis_client, commands.leave(keys, asker, ends=False, now=clock()))
    assert len(await queue.loops()) == 1, "a loop that pauses is alive"
    send(redis_client, commands.leave(keys, asker))
    assert await queue.loops() == []
    assert redis_client.hlen(keys.loops) == 0


def test_idle_loops_are_heard_of(make_queue):
    queue = make_queue()
    with Releaser(queue, Nothing(), name="one"), Releaser(queue, Nothing(), name="two"):
        wait_until(lambda: {loop.name for loop in queue.loops()} == {"one", "two"})
        wait_until(lambda: sum(loop.watching for loop in queue.loops()) == 1)
        watcher = next(loop.name for loop in queue.loops() if loop.watching)

        def ages():
            return {loop.name: loop.seen_ago for loop in queue.loops()}

        old = ages()[watcher]
        wait_until(lambda: ages()[watcher] < old, message="the watcher says that it lives about every five seconds")
    assert queue.loops() == []


def test_a_full_redis_refuses_signs_of_life_and_nothing_else(start_redis):
    server = start_redis()
    with server.client() as client, delayadapters.DelayQueue.from_url(server.url) as queue:
        keys, asker = keys_of(queue), Asker.new()
        send(client, commands.claim(keys, asker, 1, lease=10**6, limit=1, watch_ms=10_000))
        client.config_set("maxmemory", 1)
        assert send(client, commands.peek(keys, asker, watch_ms=10_000, thorough=True, beat=1)).watching
        assert send(client, commands.probe(keys, asker, beat=1, timed=True)).left > 0
