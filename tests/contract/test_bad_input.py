"""The table of bad input (design §7): each answer names the argument, and nothing is stored."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone

import pytest

from delayadapters import NewJob, Outcome, PayloadTooLarge

BEYOND = datetime(2251, 1, 1, tzinfo=timezone.utc)


async def nothing_stored(queue) -> bool:
    stats = await queue.stats()
    return (stats.waiting, stats.leased, stats.dead) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------ due in the past


@pytest.mark.parametrize("delay", [0, -1, -1e9, -1e-9, timedelta(days=-900_000)])
async def test_a_negative_delay_is_due_now(queue, clock, delay):
    assert (await queue.schedule(b"x", delay=delay)).due == clock()
    assert len(await queue.claim()) == 1


@pytest.mark.parametrize(
    "at", [datetime(2029, 12, 31, tzinfo=timezone.utc), datetime(1960, 1, 1, tzinfo=timezone.utc), datetime.min]
)
async def test_a_time_in_the_past_is_due_now(queue, clock, at):
    assert (await queue.schedule(b"x", at=at.replace(tzinfo=timezone.utc))).due == clock()
    assert len(await queue.claim()) == 1


async def test_the_past_is_not_ahead_of_what_was_due_before(queue, clock):
    """Due now means now, not then: old times do not overtake."""
    await queue.schedule(b"1", delay=0)
    clock.advance(1)
    await queue.schedule(b"2", at=clock.datetime - timedelta(days=1))
    assert [claim.payload for claim in await queue.claim()] == [b"1", b"2"]


# ---------------------------------------------------------------------------------------------- delay and at

BAD_TIMES = [
    ({"delay": math.nan}, ValueError, "delay"),
    ({"delay": math.inf}, ValueError, "delay"),
    ({"delay": -math.inf}, ValueError, "delay"),
    ({"delay": True}, TypeError, "delay"),
    ({"delay": False}, TypeError, "delay"),
    ({"delay": "5"}, TypeError, "delay"),
    ({"delay": b"5"}, TypeError, "delay"),
    ({"delay": 1j}, TypeError, "delay"),
    ({"delay": datetime(2031, 1, 1, tzinfo=timezone.utc)}, TypeError, "delay"),
    ({"delay": 250 * 366 * 86_400}, ValueError, "2250"),
    ({"delay": timedelta.max}, ValueError, "2250"),
    ({"delay": 10**400}, ValueError, "2250"),
    ({"delay": 1e300}, ValueError, "2250"),
    ({"at": True}, TypeError, "at"),
    ({"at": 1_900_000_000}, TypeError, "at"),
    ({"at": "2031-01-01T00:00:00Z"}, TypeError, "at"),
    ({"at": date(2031, 1, 1)}, TypeError, "at"),
    ({"at": timedelta(1)}, TypeError, "at"),
    ({"at": datetime(2031, 1, 1)}, ValueError, "naive"),
    ({"at": BEYOND}, ValueError, "2250"),
    ({"at": datetime.max.replace(tzinfo=timezone.utc)}, ValueError, "2250"),
    ({}, TypeError, "delay"),
    ({"delay": 1, "at": datetime(2031, 1, 1, tzinfo=timezone.utc)}, TypeError, "not both"),
    ({"delay": 0, "at": datetime(2031, 1, 1, tzinfo=timezone.utc)}, TypeError, "not both"),
]


@pytest.mark.parametrize(("when", "error", "says"), BAD_TIMES, ids=lambda value: str(value)[:30])
async def test_a_bad_time(queue, when, error, says):
    with pytest.raises(error, match=says):
        await queue.schedule(b"x", id="a", **when)
    with pytest.raises(error, match=says):
        await queue.schedule_many([NewJob(b"ok", delay=1), NewJob(b"x", id="a", **when)])
    assert await nothing_stored(queue)


@pytest.mark.parametrize(("when", "error", "says"), BAD_TIMES, ids=lambda value: str(value)[:30])
async def test_a_bad_time_for_reschedule(queue, when, error, says):
    job = await queue.schedule(b"x", delay=10, id="a")
    with pytest.raises(error, match=says):
        await queue.reschedule("a", **when)
    assert (await queue.get("a")).due == job.due


async def test_what_names_no_id_is_checked_before_the_id_is_looked_for(queue):
    with pytest.raises(TypeError, match="delay"):
        await queue.reschedule("nobody")


# --------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize("jobs", [5, None], ids=str)
async def test_schedule_many_of_no_iterable(queue, jobs):
    with pytest.raises(TypeError, match="NewJob"):
        await queue.schedule_many(jobs)


@pytest.mark.parametrize("verb", ["ack", "give_back"])
async def test_claims_that_are_no_iterable(queue, verb):
    with pytest.raises(TypeError, match="claims"):
        await getattr(queue, verb)(5)


async def test_a_meta_that_is_not_encodable(queue):
    with pytest.raises(ValueError, match="meta"):
        await queue.schedule(b"x", delay=1, meta={"task": "\ud800"})


# --------------------------------------------------------------------------------------------------- payload


NO_BYTES = ["text", None, 1, bytearray(b"x"), memoryview(b"x"), [b"x"]]


@pytest.mark.parametrize("payload", NO_BYTES, ids=lambda value: type(value).__name__)
async def test_a_payload_that_is_not_bytes(queue, payload):
    with pytest.raises(TypeError, match="payload"):
        await queue.schedule(payload, delay=1)
    with pytest.raises(TypeError, match="payload"):
        await queue.schedule_many([NewJob(b"ok", delay=1), NewJob(payload, delay=1)])
    assert await nothing_stored(queue)


async def test_a_payload_of_up_to_a_mebibyte(queue):
    await queue.schedule(bytes(1 << 20), delay=0)
    with pytest.raises(PayloadTooLarge, match="max_payload"):
        await queue.schedule(bytes((1 << 20) + 1), delay=0)
    assert (await queue.stats()).waiting == 1
    (claim,) = await queue.claim()
    assert claim.payload == bytes(1 << 20)


async def test_another_limit_or_none(make):
    small, free = make(max_payload=3), make(max_payload=None)
    await small.schedule(b"123", delay=0, id="small")
    with pytest.raises(PayloadTooLarge):
        await small.schedule(b"1234", delay=0)
    with pytest.raises(ValueError, match="payload"):  # it is one, too
        await small.schedule_many([NewJob(b"1", delay=0), NewJob(b"1234", delay=0)])
    assert (await small.stats()).waiting == 1
    await free.schedule(bytes((1 << 20) + 1), delay=0, id="large")
    assert len((await free.get("large")).payload) == (1 << 20) + 1


@pytest.mark.parametrize("value", ["x", -1, 1.5, True], ids=str)
async def test_a_limit_that_is_none(make, value):
    with pytest.raises(ValueError, match="max_payload"):
        make(max_payload=value)


# -------------------------------------------------------------------------------------------------------- id

BAD_IDS = [
    ("", ValueError),
    ("a" * 513, ValueError),
    ("é" * 257, ValueError),
    ("\ud800", ValueError),
    (b"a", TypeError),
    (1, TypeError),
]


@pytest.mark.parametrize(("id", "error"), BAD_IDS, ids=lambda value: ascii(value)[:12])
async def test_a_bad_id(queue, id, error):
    with pytest.raises(error, match="id"):
        await queue.schedule(b"x", delay=1, id=id)
    with pytest.raises(error, match="id"):
        await queue.schedule_many([NewJob(b"ok", delay=1), NewJob(b"x", delay=1, id=id)])
    for verb in (queue.cancel, queue.release_now, queue.get, queue.replay, queue.discard):
        with pytest.raises(error, match="id"):
            await verb(id)
    with pytest.raises(error, match="id"):
        await queue.reschedule(id, delay=1)
    assert await nothing_stored(queue)


# ------------------------------------------------------------------------------------------------ the others


@pytest.mark.parametrize("meta", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, ["a"], "a"], ids=repr)
async def test_meta_that_is_not_text_to_text(queue, meta):
    with pytest.raises(TypeError, match="meta"):
        await queue.schedule(b"x", delay=1, meta=meta)
    assert await nothing_stored(queue)


async def test_meta_that_no_encoding_can_hold(queue):
    with pytest.raises(ValueError, match=r"surrogate|meta"):
        await queue.schedule(b"x", delay=1, meta={"a": "\ud800"})
    assert await nothing_stored(queue)


@pytest.mark.parametrize("mode", ["", "ERROR", "drop", None, 1, True])
async def test_an_if_exists_there_is_none_of(queue, mode):
    with pytest.raises((TypeError, ValueError), match="if_exists"):
        await queue.schedule(b"x", delay=1, if_exists=mode)
    with pytest.raises((TypeError, ValueError), match="if_exists"):
        await queue.schedule_many([NewJob(b"x", delay=1)], if_exists=mode)
    assert await nothing_stored(queue)


async def test_items_that_are_no_new_jobs(queue):
    for item in (b"x", (b"x", 1), {"payload": b"x", "delay": 1}):
        with pytest.raises(TypeError, match="NewJob"):
            await queue.schedule_many([NewJob(b"ok", delay=1), item])
    assert await nothing_stored(queue)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1", None])
async def test_a_bad_limit(queue, limit):
    for verb in (queue.claim, lambda limit: queue.jobs(limit=limit), lambda limit: queue.dead_jobs(limit=limit)):
        with pytest.raises((TypeError, ValueError), match="limit"):
            await verb(limit)


@pytest.mark.parametrize("cursor", ["", "x", "1", "AAAA", "é", "-", 7])
async def test_a_cursor_no_page_gave(queue, cursor):
    await queue.schedule(b"x", delay=1)
    with pytest.raises((TypeError, ValueError), match="cursor"):
        await queue.jobs(cursor=cursor)
    with pytest.raises((TypeError, ValueError), match="cursor"):
        await queue.dead_jobs(cursor=cursor)


@pytest.mark.parametrize("moment", [datetime(2031, 1, 1), 5, "2031-01-01", date(2031, 1, 1)])
async def test_a_bad_due_before(queue, moment):
    with pytest.raises((TypeError, ValueError), match="due_before"):
        await queue.jobs(due_before=moment)


@pytest.mark.parametrize("lease", [0, -1, math.nan, math.inf, True, "30", None, 1e9])
async def test_a_bad_lease(queue, lease):
    await queue.schedule(b"x", delay=0, id="a")
    with pytest.raises((TypeError, ValueError), match="lease"):
        await queue.claim(lease=lease)
    assert (await queue.stats()).leased == 0
    claims = await queue.claim(lease=30)
    with pytest.raises((TypeError, ValueError), match="lease"):
        await queue.renew(claims, lease=lease)
    assert await queue.ack(claims) == 1


@pytest.mark.parametrize("retry_in", [math.nan, math.inf, True, "1"])
async def test_a_bad_pause_before_a_retry(queue, retry_in):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    with pytest.raises((TypeError, ValueError), match="retry_in"):
        await queue.fail(claims, "no", retry_in=retry_in)
    assert await queue.ack(claims) == 1


async def test_a_retry_beyond_the_year_2250_is_refused_like_any_due_time(queue):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    with pytest.raises(ValueError, match=r"retry_in|2250"):
        await queue.fail(claims, "no", retry_in=1e15)
    assert await queue.ack(claims) == 1


@pytest.mark.parametrize("reason", [None, b"no", 1])
async def test_a_reason_that_is_no_text(queue, reason):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    with pytest.raises(TypeError, match="reason"):
        await queue.fail(claims, reason, retry_in=None)
    assert await queue.ack(claims) == 1


async def test_claims_that_are_none(queue):
    await queue.schedule(b"x", delay=0, id="a")
    (claim,) = await queue.claim()
    for bad in ([b"x"], ["a"], [claim.entry], [None]):
        for verb in (
            queue.ack,
            queue.give_back,
            lambda bad: queue.fail(bad, "no", retry_in=None),
            lambda bad: queue.renew(bad, lease=30),
        ):
            with pytest.raises(TypeError, match="laim"):
                await verb(bad)
    assert (await queue.stats()).leased == 1


async def test_no_claims_are_no_error(queue):
    assert await queue.ack([]) == 0
    assert await queue.give_back([]) == 0
    assert await queue.fail([], "no", retry_in=None) == 0
    assert await queue.fail(iter(()), "no", retry_in=1) == 0
    assert await queue.renew([], lease=30) == []


async def test_a_queue_goes_on_after_bad_input(queue):
    for _ in range(3):
        with pytest.raises(TypeError):
            await queue.schedule("text", delay=0, id="a")
    assert (await queue.schedule(b"x", delay=0, id="a")).outcome is Outcome.SCHEDULED
    assert len(await queue.claim()) == 1
