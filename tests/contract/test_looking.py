"""jobs, dead_jobs, replay, discard, stats and purge."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from delayadapters import NewJob, Outcome, State


async def walk(pages, limit: int) -> list:
    """All jobs, page by page; checks that each page is within the limit."""
    found, cursor = [], None
    while True:
        page = await pages(limit=limit, cursor=cursor)
        assert len(page.jobs) <= limit
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found
        assert isinstance(cursor, str)
        assert page.jobs, "a page with a cursor has jobs"


async def bury(queue, ids, clock=None) -> None:
    for id in ids:
        await queue.schedule(id.encode(), delay=0, id=id)
        assert await queue.fail(await queue.claim(), f"bad {id}", retry_in=None) == 1
        if clock:
            clock.advance(1)


# ------------------------------------------------------------------------------------------------------------ jobs


async def test_an_empty_queue_is_one_empty_page(queue):
    for page in (await queue.jobs(), await queue.dead_jobs()):
        assert (list(page.jobs), page.cursor) == ([], None)


async def test_jobs_are_the_waiting_ones_in_due_order(queue, clock):
    for n in (2, 3, 1):
        await queue.schedule(b"%d" % n, delay=n, id=str(n))
    await queue.schedule(b"leased", delay=0)
    await queue.claim()
    page = await queue.jobs()
    assert [job.id for job in page.jobs] == ["1", "2", "3"]
    assert {job.state for job in page.jobs} == {State.WAITING}
    assert [job.due for job in page.jobs] == [clock() + n * 1_000_000 for n in (1, 2, 3)]
    assert page.cursor is None


@pytest.mark.parametrize("limit", [1, 3, 7, 20, 21, 100])
async def test_pages_are_the_whole_in_order(queue, limit):
    order = random.Random(5).sample(range(20), 20)
    await queue.schedule_many([NewJob(b"", delay=n, id=str(n)) for n in order])
    assert [job.id for job in await walk(queue.jobs, limit)] == [str(n) for n in range(20)]


@pytest.mark.parametrize("limit", [1, 4, 50])
async def test_pages_go_through_ties_without_losing_or_repeating_one(queue, limit):
    ids = [str(n) for n in random.Random(9).sample(range(1000), 50)]
    await queue.schedule_many([NewJob(b"", delay=5, id=id) for id in ids])
    assert [job.id for job in await walk(queue.jobs, limit)] == ids


async def test_the_last_page_has_no_cursor(queue):
    await queue.schedule_many([NewJob(b"", delay=1) for _ in range(4)])
    first = await queue.jobs(limit=2)
    assert first.cursor is not None
    second = await queue.jobs(limit=2, cursor=first.cursor)
    assert (len(second.jobs), second.cursor) == (2, None)


async def test_a_cursor_holds_while_jobs_come_and_go(queue):
    """Ties, and the very job at which a page ended disappears: the rest still comes, once and in order."""
    ids = [f"{n:02}" for n in range(30)]
    await queue.schedule_many([NewJob(b"", delay=5, id=id) for id in ids])
    seen, cursor = [], None
    for turn in range(100):
        page = await queue.jobs(limit=4, cursor=cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
        await queue.cancel(seen[-1])
        await queue.cancel(seen[0])
        await queue.cancel(ids[25 - turn])
        await queue.schedule(b"", delay=1, id=f"earlier {turn}")
    gone = {ids[25 - turn] for turn in range(100) if 25 - turn >= 0}
    assert len(seen) == len(set(seen))
    assert [id for id in ids if id in seen] == seen
    assert set(ids) - set(seen) <= gone


async def test_a_cursor_holds_when_everything_else_is_gone(queue, clock):
    await queue.schedule_many([NewJob(b"", delay=5, id=str(n)) for n in range(10)])
    page = await queue.jobs(limit=5)
    clock.advance(5)
    await queue.ack(await queue.claim())
    page = await queue.jobs(limit=5, cursor=page.cursor)
    assert (list(page.jobs), page.cursor) == ([], None)


async def test_due_before_is_exclusive(queue, clock):
    for n in range(1, 6):
        await queue.schedule(b"", delay=n, id=str(n))
    moment = clock.datetime + timedelta(seconds=3)
    assert [job.id for job in (await queue.jobs(due_before=moment)).jobs] == ["1", "2"]
    moment += timedelta(microseconds=1)
    assert [job.id for job in (await queue.jobs(due_before=moment)).jobs] == ["1", "2", "3"]
    assert (await queue.jobs(due_before=clock.datetime - timedelta(days=9999))).jobs == []


async def test_due_before_with_pages(queue, clock):
    await queue.schedule_many([NewJob(b"", delay=n, id=str(n)) for n in range(9)])
    moment = clock.datetime + timedelta(seconds=5)

    async def pages(**options):
        return await queue.jobs(due_before=moment, **options)

    assert [job.id for job in await walk(pages, 2)] == ["0", "1", "2", "3", "4"]


async def test_a_job_to_be_retried_is_listed_by_its_next_try(queue):
    await queue.schedule(b"", delay=0, id="failed")
    await queue.schedule(b"", delay=5, id="other")
    await queue.fail(await queue.claim(), "bad", retry_in=10)
    jobs = (await queue.jobs()).jobs
    assert [(job.id, job.attempts, job.reason) for job in jobs] == [("other", 0, None), ("failed", 1, "bad")]


async def test_a_page_of_large_payloads_may_end_early_but_all_come(queue):
    await queue.schedule_many([NewJob(bytes([n]) * 500_000, delay=1) for n in range(7)])
    assert [job.payload[0] for job in await walk(queue.jobs, 100)] == list(range(7))


# ------------------------------------------------------------------------------------------------------------ dead


async def test_dead_with_its_reason(queue, clock):
    due = (await queue.schedule(b"x", delay=0, id="a", meta={"k": "v"})).due
    clock.advance(5)
    await queue.fail(await queue.claim(), "cannot be read: é", retry_in=None)
    (job,) = (await queue.dead_jobs()).jobs
    assert (job.id, job.payload, job.meta, job.due) == ("a", b"x", {"k": "v"}, due)
    assert (job.state, job.attempts, job.reason) == (State.DEAD, 1, "cannot be read: é")
    stats = await queue.stats()
    assert (stats.waiting, stats.leased, stats.dead) == (0, 0, 1)
    assert await queue.claim() == []


async def test_a_long_reason_is_kept_at_least_in_part(queue):
    await queue.schedule(b"x", delay=0, id="a")
    await queue.fail(await queue.claim(), "é" * 100_000, retry_in=None)
    (job,) = (await queue.dead_jobs()).jobs
    assert job.reason.startswith("é" * 500)


async def test_dead_jobs_come_in_order_of_death(queue, clock):
    await bury(queue, ["c", "a", "b"], clock)
    assert [job.id for job in (await queue.dead_jobs()).jobs] == ["c", "a", "b"]
    assert [job.id for job in await walk(queue.dead_jobs, 1)] == ["c", "a", "b"]


async def test_pages_of_dead_jobs_that_died_together(queue):
    ids = [str(n) for n in random.Random(2).sample(range(100), 30)]
    await queue.schedule_many([NewJob(b"", delay=0, id=id) for id in ids])
    await queue.fail(await queue.claim(), "bad", retry_in=None)
    assert [job.id for job in await walk(queue.dead_jobs, 7)] == ids


async def test_a_cursor_of_dead_jobs_holds_while_they_are_discarded(queue):
    await bury(queue, [f"{n:02}" for n in range(12)])
    seen, cursor = [], None
    while True:
        page = await queue.dead_jobs(limit=5, cursor=cursor)
        seen += [job.id for job in page.jobs]
        for job in page.jobs:
            assert await queue.discard(job.id) is Outcome.DISCARDED
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == [f"{n:02}" for n in range(12)]
    assert (await queue.stats()).dead == 0


async def test_replay_makes_it_due_now_with_its_attempts_from_zero(queue, clock):
    await queue.schedule(b"x", delay=0, id="a", meta={"k": "v"})
    await queue.fail(await queue.claim(), "bad", retry_in=0)
    await queue.fail(await queue.claim(), "bad", retry_in=None)
    clock.advance(100)
    assert await queue.replay("a") is Outcome.REPLAYED
    job = await queue.get("a")
    assert (job.state, job.attempts, job.reason, job.due) == (State.WAITING, 0, None, clock())
    stats = await queue.stats()
    assert (stats.waiting, stats.due, stats.dead, stats.next_due) == (1, 1, 0, clock())
    (claim,) = await queue.claim()
    assert (claim.id, claim.payload, claim.meta, claim.attempts) == ("a", b"x", {"k": "v"}, 0)
    assert await queue.ack([claim]) == 1
    assert await queue.replay("a") is Outcome.NOT_FOUND


async def test_replay_does_not_overtake_what_was_due_before(queue, clock):
    await bury(queue, ["dead"])
    clock.advance(10)
    await queue.schedule(b"", delay=0, id="due")
    clock.advance(10)
    await queue.replay("dead")
    assert [claim.id for claim in await queue.claim()] == ["due", "dead"]


async def test_replay_and_discard_mean_every_dead_entry_of_the_id(queue, clock):
    for verb, outcome, waiting in (("replay", Outcome.REPLAYED, 3), ("discard", Outcome.DISCARDED, 0)):
        await bury(queue, ["a", "a", "a"], clock)
        assert (await queue.stats()).dead == 3
        assert await getattr(queue, verb)("a") is outcome
        stats = await queue.stats()
        assert (stats.waiting, stats.dead) == (waiting, 0)
        await queue.cancel("a")


async def test_replay_and_discard_leave_live_entries_alone(queue):
    await bury(queue, ["a"])
    await queue.schedule(b"live", delay=50, id="a")
    assert await queue.discard("a") is Outcome.DISCARDED
    assert (await queue.get("a")).payload == b"live"
    assert await queue.discard("a") is Outcome.NOT_FOUND
    assert await queue.replay("a") is Outcome.NOT_FOUND


async def test_replay_beside_a_live_entry(queue, clock):
    await bury(queue, ["a"])
    await queue.schedule(b"live", delay=50, id="a")
    assert await queue.replay("a") is Outcome.REPLAYED
    assert (await queue.stats()).waiting == 2
    clock.advance(50)
    claims = await queue.claim()
    assert [claim.payload for claim in claims] == [b"a", b"live"]
    assert await queue.ack(claims) == 2
    assert await queue.get("a") is None


@pytest.mark.parametrize("verb", ["replay", "discard"])
async def test_only_dead_jobs_are_replayed_or_discarded(queue, verb):
    call = getattr(queue, verb)
    assert await call("a") is Outcome.NOT_FOUND
    await queue.schedule(b"x", delay=0, id="a")
    assert await call("a") is Outcome.NOT_FOUND
    claims = await queue.claim()
    assert await call("a") is Outcome.NOT_FOUND
    assert await queue.ack(claims) == 1
    assert await call("a") is Outcome.NOT_FOUND


# ----------------------------------------------------------------------------------------------------------- stats


async def test_stats_in_each_state(queue, clock):
    def shown(stats):
        return stats.waiting, stats.due, stats.leased, stats.dead

    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((0, 0, 0, 0), None, 0)
    await queue.schedule_many([NewJob(b"", delay=n, id=str(n)) for n in (5, 6, 7)])
    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((3, 0, 0, 0), clock() + 5_000_000, 0)
    clock.advance(6)
    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((3, 2, 0, 0), clock() - 1_000_000, 1.0)
    clock.advance(2.5)
    assert (await queue.stats()).oldest_overdue == 3.5
    claims = await queue.claim(2)
    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((1, 1, 2, 0), clock() - 1_500_000, 1.5)
    await queue.fail(claims[:1], "bad", retry_in=None)
    assert shown(await queue.stats()) == (1, 1, 1, 1)
    await queue.fail(claims[1:], "bad", retry_in=100)
    assert shown(await queue.stats()) == (2, 1, 0, 1)
    await queue.ack(await queue.claim())
    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((1, 0, 0, 1), clock() + 100_000_000, 0)
    await queue.cancel("6")
    await queue.discard("5")
    stats = await queue.stats()
    assert (shown(stats), stats.next_due, stats.oldest_overdue) == ((0, 0, 0, 0), None, 0)


async def test_stats_count_a_passed_lease_as_leased_until_the_next_claim(queue, clock):
    await queue.schedule(b"", delay=0)
    await queue.claim(lease=1)
    clock.advance(10)
    assert (await queue.stats()).leased == 1
    await queue.claim()
    assert (await queue.stats()).leased == 1


async def test_due_counts_are_exact_in_a_crowd(queue, clock):
    order = random.Random(1).sample(range(200), 200)
    await queue.schedule_many([NewJob(b"", delay=n, id=str(n)) for n in order])
    for n in range(0, 200, 3):
        await queue.cancel(str(n))
    for n in range(1, 200, 3):
        await queue.reschedule(str(n), delay=1000 + n)
    for expected in range(10):
        clock.advance(3)
        assert (await queue.stats()).due == expected + 1


# ----------------------------------------------------------------------------------------------------------- purge


async def test_purge_forgets_everything(queue, clock):
    await bury(queue, ["dead"])
    await queue.schedule(b"", delay=0, id="released")
    await queue.ack(await queue.claim())
    await queue.schedule(b"", delay=0, id="leased")
    claims = await queue.claim()
    await queue.schedule(b"", delay=5, id="waiting")
    assert await queue.purge() is None
    stats = await queue.stats()
    assert (stats.waiting, stats.leased, stats.dead, stats.next_due) == (0, 0, 0, None)
    for id in ("dead", "leased", "waiting", "released"):
        assert await queue.get(id) is None
        assert await queue.cancel(id) is Outcome.NOT_FOUND
    assert (await queue.jobs()).jobs == (await queue.dead_jobs()).jobs == []
    assert await queue.ack(claims) == 0
    clock.advance(60)
    assert await queue.claim() == []


async def test_a_purged_queue_is_as_new(queue, clock):
    for _ in range(3):
        await queue.schedule_many([NewJob(b"%d" % n, delay=1, id=str(n)) for n in range(5)])
        clock.advance(1)
        assert [claim.payload for claim in await queue.claim()] == [b"%d" % n for n in range(5)]
        await queue.purge()


async def test_purge_of_nothing(queue):
    assert await queue.purge() is None


# ------------------------------------------------------------------------------------------------- recently released


async def test_thousands_of_released_ids_are_remembered_and_not_without_bound(queue):
    total = 25_000
    for start in range(0, total, 1000):
        await queue.schedule_many([NewJob(b"", delay=0, id=str(n)) for n in range(start, start + 1000)])
        assert await queue.ack(await queue.claim(1000)) == 1000
    for n in (total - 1, total - 5000, total - 9990):
        assert await queue.cancel(str(n)) is Outcome.RELEASED
    assert await queue.cancel("0") is Outcome.NOT_FOUND
