"""claim, ack, give_back, fail, renew: never early, in order, and only whoever holds the lease has a say."""

from __future__ import annotations

import random
from datetime import timedelta

from delayadapters import NewJob, Outcome, State


async def payloads(queue, limit: int = 100) -> list[bytes]:
    """What a claim gives; left leased."""
    return [claim.payload for claim in await queue.claim(limit)]


async def consumed(queue, limit: int = 100) -> list[bytes]:
    """What a claim gives; acked."""
    claims = await queue.claim(limit)
    assert await queue.ack(claims) == len(claims)
    return [claim.payload for claim in claims]


# ----------------------------------------------------------------------------------------------------- never early


async def test_never_early_to_the_microsecond(queue, clock):
    await queue.schedule(b"x", delay=10, id="a")
    clock.advance(10, micros=-1)
    assert await queue.claim() == []
    stats = await queue.stats()
    assert (stats.waiting, stats.due, stats.oldest_overdue) == (1, 0, 0)
    clock.advance(micros=1)
    assert (await queue.stats()).due == 1
    (claim,) = await queue.claim()
    assert claim.due == clock()


async def test_an_absolute_time_is_not_early_either(queue, clock):
    at = clock.datetime + timedelta(days=7, microseconds=333_333)
    await queue.schedule(b"x", at=at)
    clock.set(at - timedelta(microseconds=1))
    assert await queue.claim() == []
    clock.set(at)
    assert len(await queue.claim()) == 1


async def test_one_microsecond_apart(queue, clock):
    for n in range(5):
        await queue.schedule(b"%d" % n, delay=timedelta(microseconds=1000 + n))
    clock.advance(micros=999)
    for n in range(5):
        assert await queue.claim() == []
        clock.advance(micros=1)
        assert await payloads(queue) == [b"%d" % n]


async def test_a_clock_set_back_makes_nothing_early(queue, clock):
    await queue.schedule(b"x", delay=10)
    clock.advance(9)
    clock.advance(-3600)
    await queue.schedule(b"y", delay=10)
    clock.advance(10)
    assert await consumed(queue) == [b"y"]
    clock.advance(3591, micros=-1)
    assert await queue.claim() == []
    clock.advance(micros=1)
    assert await consumed(queue) == [b"x"]


async def test_a_clock_set_back_below_what_was_due_holds_it_up_until_then(queue, clock):
    await queue.schedule(b"x", delay=0)
    clock.advance(-5)
    assert (await queue.stats()).due == 0
    assert await queue.claim() == []
    clock.advance(5)
    assert await payloads(queue) == [b"x"]


async def test_a_clock_set_forward_makes_everything_between_due_in_order(queue, clock):
    for n in (3, 1, 2):
        await queue.schedule(b"%d" % n, delay=n * 86_400)
    clock.advance(timedelta(days=365))
    assert await payloads(queue) == [b"1", b"2", b"3"]


async def test_a_clock_set_back_while_leased(queue, clock):
    await queue.schedule(b"x", delay=0)
    claims = await queue.claim(lease=10)
    clock.advance(-3600)
    assert await queue.claim() == []
    assert await queue.ack(claims) == 1


# ----------------------------------------------------------------------------------------------------------- order


async def test_due_order_whatever_the_order_of_scheduling(queue, clock):
    delays = [n / 1000 for n in range(300)]
    shuffled = random.Random(7).sample(delays, len(delays))
    await queue.schedule_many([NewJob(b"%d" % round(delay * 1000), delay=delay) for delay in shuffled])
    clock.advance(1)
    got = []
    while batch := await queue.claim(37):
        assert len(batch) <= 37
        got += batch
    assert [claim.payload for claim in got] == [b"%d" % n for n in range(300)]
    assert [claim.due for claim in got] == sorted(claim.due for claim in got)


async def test_a_thousand_jobs_due_together_come_first_scheduled_first(queue, clock):
    at = clock.datetime + timedelta(seconds=1)
    for part in range(4):
        await queue.schedule_many([NewJob(b"%d" % (part * 250 + n), at=at) for n in range(250)])
    clock.advance(1)
    got = []
    while batch := await payloads(queue):
        got += batch
    assert got == [b"%d" % n for n in range(1000)]


async def test_ties_do_not_depend_on_the_ids(queue, clock):
    ids = [str(n) for n in random.Random(3).sample(range(1000), 60)]
    at = clock.datetime + timedelta(seconds=1)
    for n, id in enumerate(ids):
        if n % 2:
            await queue.schedule(b"", at=at, id=id)
        else:
            await queue.schedule(b"", delay=1, id=id)
    assert [job.id for job in (await queue.jobs()).jobs] == ids
    clock.advance(1)
    assert [claim.id for claim in await queue.claim()] == ids


async def test_ties_among_entries_of_one_id_and_others(queue):
    order = "abacabba"
    for n, id in enumerate(order):
        await queue.schedule(b"%d" % n, delay=0, id=id, if_exists="add")
    claims = await queue.claim()
    assert "".join(claim.id for claim in claims) == order
    assert [claim.payload for claim in claims] == [b"%d" % n for n in range(8)]


async def test_limit(queue):
    for n in range(5):
        await queue.schedule(b"%d" % n, delay=0)
    assert await payloads(queue, 1) == [b"0"]
    assert await payloads(queue, 3) == [b"1", b"2", b"3"]
    assert await payloads(queue, 3) == [b"4"]
    assert await payloads(queue, 3) == []


async def test_large_payloads_may_come_in_several_claims_and_all_come(queue):
    for n in range(8):
        await queue.schedule(bytes([n]) * 600_000, delay=0)
    got = []
    for _ in range(8):
        batch = await queue.claim()
        got += [claim.payload[0] for claim in batch]
        assert all(len(claim.payload) == 600_000 for claim in batch)
        await queue.ack(batch)
    assert got == list(range(8))


# --------------------------------------------------------------------------------------------------- claim and ack


async def test_a_claimed_job_is_nobody_elses(queue):
    await queue.schedule(b"x", delay=0, id="a", meta={"k": "v"})
    (claim,) = await queue.claim()
    assert (claim.id, claim.payload, claim.meta, claim.attempts, claim.requeues) == ("a", b"x", {"k": "v"}, 0, 0)
    assert await queue.claim() == []
    stats = await queue.stats()
    assert (stats.waiting, stats.due, stats.leased) == (0, 0, 1)


async def test_the_lease_is_the_deadline(queue, clock):
    await queue.schedule(b"x", delay=0)
    (claim,) = await queue.claim(lease=12.5)
    assert claim.lease == clock() + 12_500_000


async def test_ack_forgets(queue):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    assert await queue.ack(claims) == 1
    assert await queue.get("a") is None
    assert await queue.ack(claims) == 0
    stats = await queue.stats()
    assert (stats.waiting, stats.leased, stats.dead) == (0, 0, 0)


async def test_ack_takes_any_iterable_of_claims_of_several_batches(queue, clock):
    claims = []
    for n in range(4):
        await queue.schedule(b"%d" % n, delay=0)
        claims += await queue.claim(lease=10 + n)
        clock.advance(1)
    assert await queue.ack(claim for claim in reversed(claims)) == 4
    assert (await queue.stats()).leased == 0


async def test_ack_counts_those_that_were_still_ours(queue):
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=0)
    claims = await queue.claim()
    await queue.ack(claims[1:2])
    assert await queue.ack(claims) == 2


# ------------------------------------------------------------------------------------------------- leases that pass


async def test_a_lease_that_has_passed_is_requeued_by_the_next_claim(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    (old,) = await queue.claim(lease=30)
    clock.advance(30, micros=-1)
    assert await queue.claim() == []
    clock.advance(micros=1)
    (new,) = await queue.claim(lease=30)
    assert (new.id, new.due, new.requeues, new.attempts) == ("a", old.due, 1, 0)
    assert (new.entry, new.lease != old.lease) == (old.entry, True)
    clock.advance(31)
    (again,) = await queue.claim()
    assert again.requeues == 2
    assert await queue.ack([again]) == 1


async def test_requeued_jobs_take_their_old_place_in_due_order(queue, clock):
    for n in (1, 3, 5):
        await queue.schedule(b"%d" % n, delay=n)
    clock.advance(5)
    assert await payloads(queue) == [b"1", b"3", b"5"]
    for n in (2, 4):
        await queue.schedule(b"%d" % n, at=clock.datetime + timedelta(seconds=n))
    clock.advance(60)
    await queue.schedule(b"now", delay=0)
    assert await payloads(queue) == [b"1", b"3", b"5", b"2", b"4", b"now"]


async def test_requeued_ties_keep_their_order(queue, clock):
    for n in range(20):
        await queue.schedule(b"%d" % n, delay=0)
    claims = await queue.claim(lease=5)
    await queue.ack(claims[::2])
    clock.advance(5)
    assert await payloads(queue) == [b"%d" % n for n in range(1, 20, 2)]


async def test_stale_claims_have_no_say(queue, clock):
    """The fence: after the lease passed and somebody else took the job, its first holder can do nothing to it."""
    await queue.schedule(b"x", delay=0, id="a")
    stale = await queue.claim(lease=10)
    clock.advance(11)
    fresh = await queue.claim(lease=10)
    assert await queue.ack(stale) == 0
    assert await queue.give_back(stale) == 0
    assert await queue.fail(stale, "no", retry_in=None) == 0
    assert await queue.fail(stale, "no", retry_in=1) == 0
    assert await queue.renew(stale, lease=99) == []
    job = await queue.get("a")
    assert (job.state, job.attempts, job.reason) == (State.LEASED, 0, None)
    assert await queue.ack(fresh) == 1


async def test_a_late_ack_counts_while_nobody_took_the_job(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim(lease=10)
    clock.advance(60)
    assert await queue.ack(claims) == 1
    assert await queue.claim() == []
    assert await queue.cancel("a") is Outcome.RELEASED


async def test_a_stale_claim_after_a_give_back_has_no_say(queue, clock):
    await queue.schedule(b"x", delay=0)
    stale = await queue.claim(lease=10)
    await queue.give_back(stale)
    clock.advance(micros=1)
    fresh = await queue.claim(lease=10)
    assert await queue.ack(stale) == 0
    assert await queue.ack(fresh) == 1


async def test_mixed_stale_and_fresh_claims(queue, clock):
    for id in "abc":
        await queue.schedule(id.encode(), delay=0, id=id)
    stale = await queue.claim(lease=5)
    clock.advance(6)
    fresh = await queue.claim(lease=50)
    assert await queue.ack([*stale, *fresh[:1]]) == 1
    assert await queue.ack([*stale, *fresh]) == 2
    assert (await queue.stats()).leased == 0


# ------------------------------------------------------------------------------------------------------- give_back


async def test_give_back_counts_nothing_and_keeps_the_place(queue, clock):
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=n)
    clock.advance(3)
    claims = await queue.claim()
    assert await queue.give_back([claims[2], claims[0]]) == 2
    job = await queue.get(claims[0].id)
    assert (job.state, job.attempts, job.requeues, job.reason, job.due) == (State.WAITING, 0, 0, None, claims[0].due)
    again = await queue.claim()
    assert [claim.payload for claim in again] == [b"0", b"2"]
    assert [(claim.attempts, claim.requeues) for claim in again] == [(0, 0)] * 2


async def test_give_back_twice_counts_once(queue):
    await queue.schedule(b"x", delay=0)
    claims = await queue.claim()
    assert await queue.give_back(claims) == 1
    assert await queue.give_back(claims) == 0
    assert (await queue.stats()).waiting == 1


# ------------------------------------------------------------------------------------------------------------ fail


async def test_fail_waits_for_its_retry_and_counts(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    for attempt in range(1, 4):
        (claim,) = await queue.claim()
        assert claim.attempts == attempt - 1
        assert await queue.fail([claim], f"bad {attempt}", retry_in=2.5) == 1
        job = await queue.get("a")
        assert (job.state, job.attempts, job.reason) == (State.WAITING, attempt, f"bad {attempt}")
        clock.advance(2.5, micros=-1)
        assert await queue.claim() == []
        assert (await queue.stats()).due == 0
        clock.advance(micros=1)
        assert (await queue.stats()).due == 1
    (claim,) = await queue.claim()
    assert (claim.attempts, claim.requeues) == (3, 0)


async def test_a_failed_job_stops_no_other(queue, clock):
    for id in "abc":
        await queue.schedule(id.encode(), delay=0, id=id)
    claims = await queue.claim()
    await queue.fail(claims[:1], "bad", retry_in=60)
    await queue.ack(claims[1:])
    await queue.schedule(b"d", delay=1, id="d")
    clock.advance(1)
    assert await consumed(queue) == [b"d"]
    clock.advance(59)
    assert await consumed(queue) == [b"a"]


async def test_retry_in_nothing_or_less_is_at_once(queue):
    await queue.schedule(b"x", delay=0)
    await queue.fail(await queue.claim(), "bad", retry_in=0)
    claims = await queue.claim()
    assert [claim.attempts for claim in claims] == [1]
    await queue.fail(claims, "bad", retry_in=-5)
    assert [claim.attempts for claim in await queue.claim()] == [2]


async def test_a_retry_is_never_before_the_due_time_even_when_the_clock_was_set_back_meanwhile(queue, clock):
    await queue.schedule(b"x", delay=10)
    clock.advance(10)
    claims = await queue.claim(lease=30)
    clock.advance(-5)
    await queue.fail(claims, "bad", retry_in=1)
    clock.advance(5, micros=-1)
    assert await queue.claim() == []
    clock.advance(micros=1)
    assert [claim.attempts for claim in await queue.claim()] == [1]


async def test_requeues_and_attempts_are_counted_apart(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    await queue.fail(await queue.claim(), "bad", retry_in=0)
    await queue.claim(lease=1)
    clock.advance(1)
    await queue.fail(await queue.claim(), "bad again", retry_in=0)
    (claim,) = await queue.claim()
    assert (claim.attempts, claim.requeues) == (2, 1)
    await queue.give_back([claim])
    job = await queue.get("a")
    assert (job.attempts, job.requeues, job.reason) == (2, 1, "bad again")


async def test_fail_twice_counts_once(queue):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim()
    assert await queue.fail(claims, "bad", retry_in=None) == 1
    assert await queue.fail(claims, "worse", retry_in=None) == 0
    job = await queue.get("a")
    assert (job.attempts, job.reason) == (1, "bad")


# ----------------------------------------------------------------------------------------------------------- renew


async def test_renew_extends(queue, clock):
    await queue.schedule(b"x", delay=0, id="a")
    claims = await queue.claim(lease=10)
    clock.advance(9)
    (renewed,) = await queue.renew(claims, lease=10)
    assert renewed.lease == clock() + 10_000_000
    assert (renewed.entry, renewed.id, renewed.payload, renewed.due) == (
        claims[0].entry,
        "a",
        b"x",
        claims[0].due,
    )
    clock.advance(9)
    assert await queue.claim() == []
    assert await queue.ack(claims) == 0  # the old deadline is no longer the fence
    assert await queue.ack([renewed]) == 1


async def test_renew_answers_only_those_still_ours(queue, clock):
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=0)
    claims = await queue.claim(lease=10)
    await queue.ack(claims[1:2])
    clock.advance(1)
    renewed = await queue.renew(claims, lease=10)
    assert [claim.payload for claim in renewed] == [b"0", b"2"]
    assert await queue.ack(renewed) == 2


async def test_renew_of_claims_from_several_batches(queue, clock):
    claims = []
    for n in range(3):
        await queue.schedule(b"%d" % n, delay=0)
        claims += await queue.claim(lease=10 + n)
    clock.advance(5)
    renewed = await queue.renew(claims, lease=20)
    assert [claim.payload for claim in renewed] == [b"0", b"1", b"2"]
    clock.advance(19)
    assert await queue.claim() == []
    assert await queue.ack(renewed) == 3


async def test_a_renewed_lease_passes_as_well(queue, clock):
    await queue.schedule(b"x", delay=0)
    renewed = await queue.renew(await queue.claim(lease=10), lease=20)
    clock.advance(20)
    (claim,) = await queue.claim()
    assert claim.requeues == 1
    assert await queue.renew(renewed, lease=20) == []
