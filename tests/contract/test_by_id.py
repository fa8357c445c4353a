"""cancel, reschedule, release_now and get: every outcome, with one entry and with several."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delayadapters import Outcome, State

VERBS = {
    "cancel": lambda queue, id: queue.cancel(id),
    "reschedule": lambda queue, id: queue.reschedule(id, delay=5),
    "release_now": lambda queue, id: queue.release_now(id),
}
DONE = {"cancel": Outcome.CANCELLED, "reschedule": Outcome.RESCHEDULED, "release_now": Outcome.RESCHEDULED}


@pytest.fixture(params=VERBS)
def verb(request):
    return request.param


async def dead(queue, id: str = "a") -> None:
    await queue.schedule(b"dead", delay=0, id=id)
    assert await queue.fail(await queue.claim(), "bad", retry_in=None) == 1


async def released(queue, id: str = "a") -> None:
    await queue.schedule(b"gone", delay=0, id=id)
    assert await queue.ack(await queue.claim()) == 1


async def test_an_id_never_seen(queue, verb):
    await queue.schedule(b"x", delay=1, id="other")
    assert await VERBS[verb](queue, "a") is Outcome.NOT_FOUND


async def test_a_waiting_job(queue, verb):
    await queue.schedule(b"x", delay=10, id="a")
    assert await VERBS[verb](queue, "a") is DONE[verb]


async def test_a_job_that_is_due_but_unclaimed_still_waits(queue, clock, verb):
    await queue.schedule(b"x", delay=1, id="a")
    clock.advance(60)
    assert await VERBS[verb](queue, "a") is DONE[verb]


async def test_a_leased_job_is_left_alone(queue, clock, verb):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    before = await queue.get("a")
    clock.advance(1)
    assert await VERBS[verb](queue, "a") is Outcome.IN_FLIGHT
    assert await queue.get("a") == before
    assert await queue.ack(claims) == 1


async def test_a_job_whose_lease_has_passed_is_in_flight_until_the_next_claim(queue, clock, verb):
    await queue.schedule(b"x", delay=0, id="a")
    await queue.claim(lease=1)
    clock.advance(5)
    assert await VERBS[verb](queue, "a") is Outcome.IN_FLIGHT


async def test_a_released_job(queue, verb):
    await released(queue)
    assert await VERBS[verb](queue, "a") is Outcome.RELEASED
    assert await VERBS[verb](queue, "a") is Outcome.RELEASED


async def test_a_released_job_long_after(queue, clock, verb):
    await released(queue)
    clock.advance(1800)
    assert await VERBS[verb](queue, "a") is Outcome.RELEASED


async def test_a_dead_job_is_not_live(queue, verb):
    await dead(queue)
    assert await VERBS[verb](queue, "a") is Outcome.NOT_FOUND
    assert (await queue.stats()).dead == 1
    assert (await queue.get("a")).state is State.DEAD


async def test_a_job_scheduled_again_after_its_release_waits(queue, verb):
    await released(queue)
    await queue.schedule(b"again", delay=10, id="a")
    assert await VERBS[verb](queue, "a") is DONE[verb]


async def test_every_waiting_entry_is_meant(queue, verb, clock):
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=10 + n, id="a", if_exists="add")
    assert await VERBS[verb](queue, "a") is DONE[verb]
    dues = [job.due - clock() for job in (await queue.jobs()).jobs]
    assert dues == {"cancel": [], "reschedule": [5_000_000] * 3, "release_now": [0] * 3}[verb]


async def test_with_one_entry_leased_the_waiting_ones_are_changed_all_the_same(queue, verb, clock):
    await queue.schedule(b"leased", delay=0, id="a")
    claims = await queue.claim()
    for n in range(2):
        await queue.schedule(b"%d" % n, delay=10 + n, id="a", if_exists="add")
    assert await VERBS[verb](queue, "a") is Outcome.IN_FLIGHT
    dues = [job.due - clock() for job in (await queue.jobs()).jobs]
    assert dues == {"cancel": [], "reschedule": [5_000_000] * 2, "release_now": [0] * 2}[verb]
    assert (await queue.stats()).leased == 1
    assert await queue.ack(claims) == 1


# ---------------------------------------------------------------------------------------------------------- cancel


async def test_cancelled_is_final(queue, clock):
    await queue.schedule(b"x", delay=10, id="a")
    assert await queue.cancel("a") is Outcome.CANCELLED
    assert await queue.get("a") is None
    clock.advance(60)
    assert await queue.claim() == []
    assert await queue.cancel("a") is Outcome.NOT_FOUND


async def test_cancel_takes_no_other_job_along(queue, clock):
    for id in "abc":
        await queue.schedule(id.encode(), delay=1, id=id)
    await queue.cancel("b")
    clock.advance(1)
    assert [claim.id for claim in await queue.claim()] == ["a", "c"]


async def test_cancelled_after_an_earlier_release_is_not_released(queue):
    """What is remembered of the first scheduling must not speak for the second."""
    await released(queue)
    await queue.schedule(b"again", delay=10, id="a")
    assert await queue.cancel("a") is Outcome.CANCELLED
    assert await queue.cancel("a") is Outcome.NOT_FOUND


async def test_a_cancelled_id_is_free(queue):
    await queue.schedule(b"1", delay=10, id="a")
    await queue.cancel("a")
    assert (await queue.schedule(b"2", delay=10, id="a")).outcome is Outcome.SCHEDULED
    assert (await queue.get("a")).payload == b"2"


async def test_cancel_between_failure_and_retry_is_final(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    await queue.fail(await queue.claim(), "bad", retry_in=5)
    assert await queue.cancel("a") is Outcome.CANCELLED
    clock.advance(60)
    assert await queue.claim() == []


# ------------------------------------------------------------------------------------------------------ reschedule


async def test_reschedule_earlier_and_later(queue, clock):
    await queue.schedule(b"a", delay=10, id="a")
    await queue.schedule(b"b", delay=20, id="b")
    await queue.reschedule("a", delay=30)
    await queue.reschedule("b", at=clock.datetime + timedelta(seconds=5))
    assert [(job.id, job.due - clock()) for job in (await queue.jobs()).jobs] == [("b", 5_000_000), ("a", 30_000_000)]
    assert (await queue.get("a")).due == clock() + 30_000_000
    clock.advance(29.999_999)
    claims = await queue.claim()
    assert [(claim.id, claim.due) for claim in claims] == [("b", clock() - 24_999_999)]
    clock.advance(micros=1)
    assert [claim.id for claim in await queue.claim()] == ["a"]


async def test_reschedule_keeps_payload_meta_and_counts(queue, clock):
    await queue.schedule(b"x", delay=0, id="a", meta={"k": "v"})
    await queue.fail(await queue.claim(), "bad", retry_in=1)
    await queue.reschedule("a", delay=50)
    job = await queue.get("a")
    assert (job.payload, job.meta, job.attempts, job.reason) == (b"x", {"k": "v"}, 1, "bad")
    clock.advance(49)
    assert await queue.claim() == []
    clock.advance(1)
    assert [claim.attempts for claim in await queue.claim()] == [1]


async def test_reschedule_there_and_back_delivers_once(queue, clock):
    job = await queue.schedule(b"x", delay=10, id="a")
    for _ in range(5):
        await queue.reschedule("a", delay=99)
        await queue.reschedule("a", at=job.due_at)
    stats = await queue.stats()
    assert (stats.waiting, stats.next_due) == (1, job.due)
    assert len((await queue.jobs()).jobs) == 1
    clock.advance(10)
    assert (await queue.stats()).due == 1
    assert len(await queue.claim()) == 1
    assert await queue.claim() == []


async def test_reschedule_into_the_past_is_due_now(queue, clock):
    await queue.schedule(b"x", delay=10, id="a")
    await queue.reschedule("a", at=clock.datetime - timedelta(days=1))
    assert (await queue.get("a")).due == clock()


async def test_release_now_is_due_now(queue, clock):
    await queue.schedule(b"x", delay=10, id="a")
    clock.advance(3)
    assert await queue.release_now("a") is Outcome.RESCHEDULED
    assert (await queue.get("a")).due == clock()
    (claim,) = await queue.claim()
    assert (claim.id, claim.due) == ("a", clock())


async def test_release_now_does_not_wait_for_a_retry(queue):
    await queue.schedule(b"x", delay=0, id="a")
    await queue.fail(await queue.claim(), "bad", retry_in=300)
    assert await queue.release_now("a") is Outcome.RESCHEDULED
    assert [claim.attempts for claim in await queue.claim()] == [1]


# ------------------------------------------------------------------------------------------------------------- get


async def test_get_of_nothing_cancelled_or_released(queue):
    assert await queue.get("a") is None
    await queue.schedule(b"x", delay=1, id="a")
    await queue.cancel("a")
    assert await queue.get("a") is None
    await released(queue)
    assert await queue.get("a") is None


async def test_get_in_each_state(queue, clock):
    scheduled = await queue.schedule(b"x", delay=1, id="a", meta={"k": "v"})
    job = await queue.get("a")
    assert (job.id, job.due, job.payload, job.meta) == ("a", scheduled.due, b"x", {"k": "v"})
    assert (job.state, job.attempts, job.requeues, job.reason, job.outcome) == (State.WAITING, 0, 0, None, None)
    clock.advance(1)
    claims = await queue.claim()
    assert ((await queue.get("a")).state, (await queue.get("a")).due) == (State.LEASED, scheduled.due)
    await queue.fail(claims, "bad", retry_in=None)
    job = await queue.get("a")
    assert (job.state, job.attempts, job.reason, job.due) == (State.DEAD, 1, "bad", scheduled.due)


async def test_get_of_several_entries_answers_waiting_then_leased_then_dead(queue):
    await dead(queue)
    assert (await queue.get("a")).state is State.DEAD
    await queue.schedule(b"leased", delay=0, id="a")
    await queue.claim()
    assert (await queue.get("a")).payload == b"leased"
    await queue.schedule(b"later", delay=20, id="a", if_exists="add")
    await queue.schedule(b"sooner", delay=10, id="a", if_exists="add")
    assert (await queue.get("a")).payload == b"sooner"
