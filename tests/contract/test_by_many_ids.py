"""cancel_many and reschedule_many: what cancel and reschedule do to one id, for many."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from delayadapters import NewJob, Outcome

VERBS = {
    "cancel": lambda queue, ids: queue.cancel_many(ids),
    "reschedule": lambda queue, ids: queue.reschedule_many(ids, delay=5),
}
DONE = {"cancel": Outcome.CANCELLED, "reschedule": Outcome.RESCHEDULED}


@pytest.fixture(params=VERBS)
def verb(request):
    return request.param


async def test_each_id_has_its_outcome_in_the_order_asked(queue, verb):
    await queue.schedule(b"", delay=0, id="released")
    assert await queue.ack(await queue.claim()) == 1
    await queue.schedule(b"", delay=0, id="leased")
    assert len(await queue.claim()) == 1
    await queue.schedule_many([NewJob(b"", delay=60, id=id) for id in ("a", "b", "kept")])
    asked = ["b", "never", "leased", "a", "released", "b"]
    said = await VERBS[verb](queue, asked)
    done = DONE[verb]
    assert said == [done, Outcome.NOT_FOUND, Outcome.IN_FLIGHT, done, Outcome.RELEASED, done]
    left = {job.id for job in (await queue.jobs()).jobs}
    assert left == ({"kept"} if verb == "cancel" else {"kept", "a", "b"})


async def test_more_than_go_in_one_round_trip(queue, verb, clock):
    ids = [f"id-{n}" for n in range(450)]
    await queue.schedule_many([NewJob(b"", delay=60, id=id) for id in ids])
    assert await VERBS[verb](queue, iter(ids)) == [DONE[verb]] * 450
    dues = {job.due - clock() for job in (await queue.jobs(limit=500)).jobs}
    assert dues == (set() if verb == "cancel" else {5_000_000})


async def test_every_waiting_entry_of_an_id_is_meant(queue, verb, clock):
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=10 + n, id="a", if_exists="add")
    await queue.schedule(b"", delay=10, id="b")
    assert await VERBS[verb](queue, ["a"]) == [DONE[verb]]
    dues = sorted(job.due - clock() for job in (await queue.jobs()).jobs)
    assert dues == ([10_000_000] if verb == "cancel" else [5_000_000] * 3 + [10_000_000])


async def test_with_one_entry_leased_the_waiting_ones_are_changed_all_the_same(queue, verb):
    await queue.schedule(b"leased", delay=0, id="a")
    claims = await queue.claim()
    await queue.schedule(b"", delay=10, id="a", if_exists="add")
    assert await VERBS[verb](queue, ["a"]) == [Outcome.IN_FLIGHT]
    assert (await queue.stats()).waiting == (0 if verb == "cancel" else 1)
    assert await queue.ack(claims) == 1


async def test_after_a_cancel_nothing_is_known_of_an_id(queue):
    """Not even that an earlier entry of it was released; as with cancel()."""
    await queue.schedule(b"", delay=0, id="a")
    await queue.ack(await queue.claim())
    await queue.schedule(b"", delay=10, id="a")
    assert await queue.cancel_many(["a"]) == [Outcome.CANCELLED]
    assert await queue.cancel_many(["a"]) == [Outcome.NOT_FOUND]


async def test_released_many_at_once_are_known(queue, verb):
    """However long the list of recent releases is."""
    ids = [f"id-{n}" for n in range(3000)]
    await queue.schedule_many([NewJob(b"", delay=0, id=id) for id in ids])
    while claims := await queue.claim(500):
        await queue.ack(claims)
    assert await VERBS[verb](queue, ["id-0", "x", "id-2999"]) == [Outcome.RELEASED, Outcome.NOT_FOUND, Outcome.RELEASED]


async def test_an_absolute_time(queue, clock):
    await queue.schedule_many([NewJob(b"", delay=60, id=id) for id in "ab"])
    at = datetime(2031, 1, 1, tzinfo=timezone.utc)
    assert await queue.reschedule_many(["a"], at=at) == [Outcome.RESCHEDULED]
    assert (await queue.get("a")).due_at == at
    assert await queue.reschedule_many(["a"], at=datetime(2001, 1, 1, tzinfo=timezone.utc)) == [Outcome.RESCHEDULED]
    assert (await queue.get("a")).due == clock()


async def test_no_ids(queue, verb):
    assert await VERBS[verb](queue, []) == []


@pytest.mark.parametrize("ids", ["abc", b"abc", 5, None, [5], ["a", ""], ["a", "x" * 513]])
async def test_bad_ids_change_nothing(queue, verb, ids):
    await queue.schedule(b"", delay=60, id="a")
    before = await queue.get("a")
    with pytest.raises((TypeError, ValueError)):
        await VERBS[verb](queue, ids)
    assert await queue.get("a") == before


@pytest.mark.parametrize("when", [{}, {"delay": "x"}, {"delay": 1, "at": datetime.now(timezone.utc)}])
async def test_bad_times(queue, when):
    with pytest.raises((TypeError, ValueError)):
        await queue.reschedule_many([], **when)
