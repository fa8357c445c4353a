"""Microseconds, fences and sequence numbers keep every digit on their way through Lua and back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import NewJob, Outcome
from delayadapters.due import from_micros
from delaytests.raw import content, keys_of

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
YEAR_2250 = (datetime(2250, 1, 1, tzinfo=timezone.utc) - EPOCH) // timedelta(microseconds=1) - 1
MOMENTS = [1_764_437_836_123_457, 1_893_456_000_000_001, 4_102_444_799_999_999, 8_800_000_000_000_001, YEAR_2250]


@pytest.fixture
def early(clock):
    clock.set(1_700_000_000_000_001)
    return clock


@pytest.mark.parametrize("micros", MOMENTS)
def test_a_due_time_keeps_its_microseconds(make_queue, early, redis_client, micros):
    queue = make_queue(clock=early)
    keys = keys_of(queue)
    at = from_micros(micros)
    job = queue.schedule(b"x", at=at, id="a")
    assert job.due == micros
    assert queue.get("a").due == micros
    assert [one.due for one in queue.jobs().jobs] == [micros]
    assert queue.stats().next_due == micros
    assert content(redis_client, keys.due)[0][1] == micros
    assert redis_client.zrange(keys.due, 0, 0, withscores=True)[0][1] == micros
    assert queue.schedule(b"y", delay=0, id="a", if_exists="keep").due == micros
    early.set(micros - 1)
    assert queue.claim() == []
    early.set(micros)
    (claim,) = queue.claim(lease=0.001)
    assert (claim.due, claim.lease) == (micros, micros + 1000)
    (renewed,) = queue.renew([claim], lease=1.000001)
    assert renewed.lease == micros + 1_000_001
    assert queue.ack([claim]) == 0, "the old fence"
    assert queue.fail([renewed], "why", retry_in=0.000003) == 1
    assert queue.get("a").due == micros
    assert content(redis_client, keys.due)[0][1] == micros + 3
    early.set(micros + 3)
    assert queue.fail(queue.claim(), "why", retry_in=None) == 1
    assert content(redis_client, keys.dead)[0][1] == micros + 3


@pytest.mark.parametrize("micros", MOMENTS)
def test_a_rescheduled_due_time_keeps_its_microseconds(make_queue, early, micros):
    queue = make_queue(clock=early)
    queue.schedule(b"x", delay=0, id="a")
    queue.reschedule("a", at=from_micros(micros))
    assert queue.get("a").due == micros
    early.set(micros - 1)
    queue.reschedule("a", delay=timedelta(microseconds=1))
    assert queue.get("a").due == micros


def test_a_relative_delay_keeps_its_microseconds(make_queue, clock):
    queue = make_queue(clock=clock)
    start = clock.set(1_764_437_836_123_457) or clock()
    for micros in (1, 999_999, 86_400_000_001, 3_000_000_000_000_001):
        assert queue.schedule(b"x", delay=timedelta(microseconds=micros)).due == start + micros


def test_the_servers_own_clock_has_microseconds(queue, redis_client):
    dues = {queue.schedule(b"x", delay=0).due % 1000 for _ in range(30)}
    assert len(dues) > 1
    seconds, micros = redis_client.time()
    assert abs(queue.schedule(b"x", delay=0).due - (seconds * 1_000_000 + micros)) < 5_000_000


def test_fences_of_one_instant_differ(make_queue, clock):
    clock.set(1_764_437_836_123_457)
    queue = make_queue(clock=clock)
    queue.schedule_many([NewJob(b"%d" % n, 0) for n in range(5)])
    claims = [queue.claim(1)[0] for _ in range(5)]
    assert [claim.lease - clock() for claim in claims] == [30_000_000 + n for n in range(5)]
    assert queue.ack([claims[1], claims[3]]) == 2
    assert queue.stats().leased == 3


def test_a_fence_off_by_one_is_refused(make_queue, clock):
    import dataclasses

    clock.set(YEAR_2250)
    queue = make_queue(clock=clock)
    queue.schedule(b"x", delay=0, id="a")
    (claim,) = queue.claim()
    for wrong in (claim.lease - 1, claim.lease + 1, 0):
        stale = dataclasses.replace(claim, lease=wrong)
        assert queue.ack([stale]) == queue.give_back([stale]) == queue.fail([stale], "", retry_in=1) == 0
        assert queue.renew([stale]) == []
    assert queue.ack([claim]) == 1


# ------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("before", [0, 120, 127, 250, 32_760, 65_530, 2**23 - 5, 2**24 - 5, 2**31 - 5, 2**39 - 5])
def test_equal_due_times_come_out_as_scheduled_over_every_byte(make_queue, clock, redis_client, before):
    """Entries are ordered by their six-byte number; every carry from one byte to the next is passed here."""
    queue = make_queue(clock=clock)
    redis_client.set(keys_of(queue).seq, before)
    for n in range(10):
        # Every third shares an id that is taken: those numbers are odd.
        queue.schedule(b"%d" % n, delay=1, id="same" if n % 3 == 0 else None, if_exists="add")
    expected = [b"%d" % n for n in range(10)]
    assert [job.payload for job in queue.jobs().jobs] == expected
    clock.advance(1)
    assert [claim.payload for claim in queue.claim()] == expected


@pytest.mark.slow
def test_ties_beyond_65536(make_queue, clock, redis_client):
    queue = make_queue(clock=clock)
    total = 66_000
    queue.schedule_many([NewJob(b"%d" % n, 1) for n in range(total)])
    keys = keys_of(queue)
    assert redis_client.zcard(keys.due) == total
    rank = 65_990
    entry = redis_client.zrange(keys.due, rank, rank)[0]
    assert redis_client.hget(keys.entries, entry[6:]).endswith(b"%d" % rank)
    # A page in the middle of so many equal scores, found by its cursor.
    seen, cursor = 0, None
    while True:
        page = queue.jobs(limit=10_000, cursor=cursor)
        assert [int(job.payload) for job in page.jobs] == list(range(seen, seen + len(page.jobs)))
        seen, cursor = seen + len(page.jobs), page.cursor
        if cursor is None:
            break
    assert seen == total
    clock.advance(1)
    assert [int(claim.payload) for claim in queue.claim(1000)] == list(range(1000))
    assert queue.stats().due == total - 1000


def test_an_id_with_more_entries_than_unpack_takes(make_queue, clock):
    queue = make_queue(clock=clock)
    jobs = [NewJob(b"%d" % n, n, id="a") for n in range(9000)]
    for at in range(0, 9000, 4500):
        queue.schedule_many(jobs[at : at + 4500], if_exists="add")
    assert queue.stats().waiting == 9000
    assert queue.get("a").payload == b"0"
    assert queue.cancel("a") is Outcome.CANCELLED
    assert queue.stats().waiting == 0
    assert queue.get("a") is None
