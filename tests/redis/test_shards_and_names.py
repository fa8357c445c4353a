"""Several shards are one queue; two names are two."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

from delayadapters import DelayQueue, NewJob, Outcome, State
from delayadapters.redis.keys import ShardKeys, check_name, shard_of
from delaytests.raw import content, keys_of, snapshot

# ------------------------------------------------------------------------------------------------------------- shards


@pytest.fixture
def queue(make_queue, clock):
    return make_queue(shards=5, clock=clock)


def pages(ask, **options):
    """All pages, one after the other."""
    cursor, out = None, []
    while True:
        page = ask(cursor=cursor, **options)
        out.append([job.id for job in page.jobs])
        cursor = page.cursor
        if cursor is None:
            return out


def test_jobs_spread_over_the_shards(queue, redis_client):
    queue.schedule_many([NewJob(b"x", 60, id=f"job-{n}") for n in range(500)])
    counts = [redis_client.zcard(keys_of(queue, shard).due) for shard in range(5)]
    assert sum(counts) == 500
    assert min(counts) > 50
    for n in range(500):
        assert redis_client.hexists(keys_of(queue, shard_of(f"job-{n}".encode(), 5)).entries, f"job-{n}")


def test_the_shard_of_an_id_is_for_good():
    """Stored jobs are found by it: it must not change between versions."""
    assert [shard_of(id, 7) for id in (b"", b"a", "ä€".encode(), b"job-42")] == [0, 4, 4, 1]
    assert shard_of(b"anything", 1) == 0


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pages_go_across_shards_in_due_order(queue, clock, limit):
    jobs = [NewJob(b"%d" % n, (n * 37) % 60 + 1, id=f"j{n}") for n in range(60)]
    due = {job.id: job.due for job in queue.schedule_many(jobs)}
    got = pages(queue.jobs, limit=limit)
    assert all(len(page) == limit for page in got[:-1])
    ids = list(itertools.chain(*got))
    assert sorted(ids) == sorted(due)
    assert [due[id] for id in ids] == sorted(due.values())
    some = pages(queue.jobs, limit=limit, due_before=clock.datetime + timedelta(seconds=21))
    assert list(itertools.chain(*some)) == ids[:20]


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_pages_of_equal_due_times_leave_nobody_out(queue, limit):
    queue.schedule_many([NewJob(b"x", 5, id=f"j{n}") for n in range(40)])
    ids = list(itertools.chain(*pages(queue.jobs, limit=limit)))
    assert len(ids) == len(set(ids)) == 40


def test_pages_of_large_jobs_across_shards(queue):
    queue.schedule_many([NewJob(bytes(400_000), n + 1, id=f"j{n}") for n in range(20)])
    got = pages(queue.jobs, limit=10)
    assert list(itertools.chain(*got)) == [f"j{n}" for n in range(20)]


def test_dead_jobs_across_shards(queue, clock):
    queue.schedule_many([NewJob(b"x", 0, id=f"j{n}") for n in range(20)])
    for claim in sorted(queue.claim(), key=lambda claim: int(claim.id[1:])):
        clock.advance(1)
        assert queue.fail([claim], "why", retry_in=None) == 1
    got = pages(queue.dead_jobs, limit=6)
    assert list(itertools.chain(*got)) == [f"j{n}" for n in range(20)]
    assert all(queue.get(f"j{n}").state is State.DEAD for n in range(20))
    assert queue.replay("j7") is Outcome.REPLAYED
    assert queue.discard("j8") is Outcome.DISCARDED
    assert queue.stats().dead == 18


def test_stats_are_of_all_shards(queue, clock):
    queue.schedule_many([NewJob(b"x", n, id=f"j{n}") for n in range(30)])
    clock.advance(9)
    stats = queue.stats()
    assert (stats.waiting, stats.due, stats.oldest_overdue) == (30, 10, 9.0)
    claims = queue.claim(8)
    assert len(claims) == 8
    queue.fail(claims[:2], "why", retry_in=None)
    stats = queue.stats()
    assert (stats.waiting, stats.due, stats.leased, stats.dead) == (22, 2, 6, 2)
    queue.ack(claims[2:])
    queue.ack(queue.claim())
    assert queue.stats().next_due == clock() + 1_000_000
    assert queue.stats().oldest_overdue == 0


def test_claims_of_several_shards_end_together(queue, clock):
    queue.schedule_many([NewJob(b"x", 0, id=f"j{n}") for n in range(30)])
    first = queue.claim(30)
    assert len({shard_of(claim.id.encode(), 5) for claim in first}) == 5
    clock.advance(5)
    first = queue.renew(first)
    assert len(first) == 30
    assert queue.ack(first[:10]) == 10
    assert queue.give_back(first[10:20]) == 10
    assert queue.fail(first[20:], "why", retry_in=3) == 10
    assert queue.ack(first) == 0
    assert queue.stats().due == 10


def test_purge_leaves_nothing_of_any_shard(queue, redis_client):
    queue.schedule_many([NewJob(b"x", n % 2, id=f"j{n}") for n in range(40)])
    queue.fail(queue.claim(5), "why", retry_in=None)
    queue.ack(queue.claim(5))
    queue.cancel("j1")
    assert len(snapshot(redis_client)) > 20
    queue.purge()
    assert snapshot(redis_client) == {}


@pytest.mark.parametrize("shards", [0, -1, True, 1.0, "2", None])
def test_a_bad_number_of_shards(shards):
    with pytest.raises(ValueError, match="shards"):
        DelayQueue(None, shards=shards)


# -------------------------------------------------------------------------------------------------------------- names

NAMES = [
    "a",
    "a:0",
    "a:1",
    "a:0:due",
    "a ",
    "A",
    "ä",
    "a\u0308",
    "日本語:queue",
    "with space",
    "*",
    "[ab]",
    "a*",
    "x\ny",
    "%s",
    "due",
]


def test_two_names_never_mix(make_queue, redis_client):
    queues = {name: make_queue(name=name) for name in NAMES}
    for n, (name, queue) in enumerate(queues.items()):
        queue.schedule(name.encode(), delay=0, id="same")
        queue.schedule_many([NewJob(b"x", 60)] * n)
    for n, (name, queue) in enumerate(queues.items()):
        stats = queue.stats()
        assert (stats.waiting, stats.due) == (n + 1, 1), name
        (claim,) = queue.claim()
        assert claim.payload == name.encode()
        assert queue.ack([claim]) == 1
    for n, (name, queue) in enumerate(queues.items()):
        assert len(queue.jobs().jobs) == n
        queue.purge()
        others = [other.stats().waiting for key, other in queues.items() if key != name]
        assert sum(others) == sum(range(n + 1, len(NAMES)))
    assert snapshot(redis_client) == {}


def test_the_keys_of_two_names_or_shards_are_never_the_same():
    seen = {}
    for name in NAMES:
        for shard in range(12):
            keys = ShardKeys.of(name, shard)
            for key in (*keys.stored(), keys.wake):
                assert seen.setdefault(key, (name, shard)) == (name, shard)


def test_the_keys_of_a_shard_share_one_hash_tag():
    for name in NAMES:
        keys = ShardKeys.of(name, 3)
        tag = f"{{{name}:3}}:".encode()
        assert all(key.startswith(tag) and key.count(b"{") == 1 for key in (*keys.stored(), keys.wake))
        assert len(set(keys.stored())) == 14


def test_the_names_of_the_keys_are_for_good():
    """Stored jobs are found by them."""
    keys = ShardKeys.of("n", 0)
    assert [key.decode() for key in (*keys.stored(), keys.wake)] == [
        f"{{n:0}}:{field}"
        for field in (
            "due", "leased", "dead", "entries", "seq", "watch", "loops", "calls", "calls-old", "released",
            "released-old", "released-new", "counts", "imported", "wake",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["", "{", "a}", "{a}"])
def test_a_name_that_would_break_the_hash_tag(name):
    with pytest.raises(ValueError, match="name"):
        check_name(name)
    with pytest.raises(ValueError, match="name"):
        DelayQueue(None, name=name)


@pytest.mark.parametrize("name", [b"a", None, 1])
def test_a_name_that_is_no_text(name):
    with pytest.raises(TypeError, match="name"):
        DelayQueue(None, name=name)


@pytest.mark.parametrize("id", ["a", "\0", "\n", " ", "ä" * 256, "x" * 512, "{a}", "*", "\x7f", "\U0010ffff", "0" * 6])
def test_any_id_is_found_again(make_queue, clock, redis_client, id):
    queue = make_queue(shards=3, clock=clock)
    for n in range(3):
        queue.schedule(b"%d" % n, delay=n, id=id, if_exists="add")
    assert queue.get(id).id == id
    assert [job.id for job in queue.jobs().jobs] == [id] * 3
    assert queue.claim()[0].id == id
    assert queue.cancel(id) is Outcome.IN_FLIGHT
    assert queue.ack(queue.claim()) == 0
    clock.advance(31)
    assert queue.ack(queue.claim()) == 1
    assert all(content(redis_client, keys_of(queue, shard).entries) is None for shard in range(3))
