"""schedule and schedule_many: what is stored, and what a second schedule of an id does."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import JobExists, NewJob, Outcome, State

ALL_BYTES = bytes(range(256))


async def ids_of(queue) -> list[str]:
    return [job.id for job in (await queue.jobs()).jobs]


# ------------------------------------------------------------------------------------------------- what is stored


async def test_a_delay_counts_from_now_and_the_job_says_so(queue, clock):
    job = await queue.schedule(b"x", delay=1.5, id="a")
    assert job.due == clock() + 1_500_000
    assert job.due_at == clock.datetime + timedelta(seconds=1.5)
    assert (job.id, job.payload, job.meta, job.state) == ("a", b"x", {}, State.WAITING)
    assert (job.attempts, job.requeues, job.reason, job.outcome) == (0, 0, None, Outcome.SCHEDULED)


@pytest.mark.parametrize("delay", [3, 3.0, timedelta(seconds=3)], ids=["int", "float", "timedelta"])
async def test_a_delay_is_seconds_or_a_timedelta(queue, clock, delay):
    assert (await queue.schedule(b"", delay=delay)).due == clock() + 3_000_000


async def test_an_absolute_time_is_kept_to_the_microsecond(queue, clock):
    at = clock.datetime + timedelta(days=400, microseconds=123_457)
    assert (await queue.schedule(b"", at=at, id="a")).due_at == at
    assert (await queue.get("a")).due_at == at


async def test_an_absolute_time_may_be_in_any_time_zone(queue, clock):
    at = (clock.datetime + timedelta(hours=1)).astimezone(timezone(timedelta(hours=-9, minutes=-30)))
    assert (await queue.schedule(b"", at=at)).due == clock() + 3_600_000_000


async def test_the_last_microsecond_of_2250_is_kept_exactly(queue):
    at = datetime(2250, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)
    await queue.schedule(b"", at=at, id="a")
    assert (await queue.get("a")).due_at == at


async def test_an_id_is_made_up_when_none_is_given(queue):
    first, second = [await queue.schedule(b"", delay=1) for _ in range(2)]
    assert first.id
    assert first.id != second.id
    assert (await queue.get(first.id)).id == first.id


@pytest.mark.parametrize(
    "payload", [b"", b"\0", ALL_BYTES, ALL_BYTES[::-1] * 40, b"\xff" * 13], ids=["empty", "nul", "all", "long", "ff"]
)
async def test_a_payload_comes_back_byte_for_byte(queue, payload):
    await queue.schedule(payload, delay=0, id="a", meta={"k": "v"})
    await queue.schedule(payload, delay=0, id="b")
    assert (await queue.get("a")).payload == payload
    assert [job.payload for job in (await queue.jobs()).jobs] == [payload, payload]
    assert [claim.payload for claim in await queue.claim()] == [payload, payload]


@pytest.mark.parametrize(
    "id",
    ["a", "0", " ", "\0", "a\nb", "é", "日本", "🦆", "{x}", "*", "\x7f", "￿", "a" * 512, "é" * 256, "\U0010ffff" * 128],
    ids=lambda id: f"{id[:2]!a}x{len(id)}",
)
async def test_an_id_may_be_any_text_of_up_to_512_bytes(queue, id):
    assert (await queue.schedule(b"x", delay=0, id=id)).id == id
    assert (await queue.get(id)).id == id
    assert await ids_of(queue) == [id]
    (claim,) = await queue.claim()
    assert claim.id == id
    assert await queue.fail([claim], "no", retry_in=None) == 1
    assert [job.id for job in (await queue.dead_jobs()).jobs] == [id]
    assert await queue.replay(id) is Outcome.REPLAYED
    assert await queue.cancel(id) is Outcome.CANCELLED


async def test_ids_that_are_beginnings_of_each_other_are_different_ids(queue):
    for id in ("a", "aa", "aaa", "A"):
        await queue.schedule(id.encode(), delay=1, id=id)
    assert await queue.cancel("aa") is Outcome.CANCELLED
    assert await ids_of(queue) == ["a", "aaa", "A"]
    assert (await queue.get("a")).payload == b"a"


async def test_meta_comes_back(queue):
    meta = {"task": "tasks.add", "queue": "déjà 🦆", "": "", "long": "x" * 300}
    job = await queue.schedule(b"x", delay=0, id="a", meta=meta)
    assert job.meta == meta
    meta["task"] = "changed after the call"
    kept = meta | {"task": "tasks.add"}
    assert (await queue.get("a")).meta == kept
    assert (await queue.jobs()).jobs[0].meta == kept
    (claim,) = await queue.claim()
    assert claim.meta == kept
    await queue.fail([claim], "no", retry_in=None)
    assert (await queue.dead_jobs()).jobs[0].meta == kept


@pytest.mark.parametrize("meta", [None, {}])
async def test_without_meta_it_is_empty(queue, meta):
    assert (await queue.schedule(b"", delay=0, id="a", meta=meta)).meta == {}
    assert (await queue.get("a")).meta == {}


# ------------------------------------------------------------------------------------------------------- if_exists


async def test_error_refuses_an_id_that_waits_and_changes_nothing(queue):
    first = await queue.schedule(b"1", delay=10, id="a")
    with pytest.raises(JobExists) as caught:
        await queue.schedule(b"2", delay=5, id="a")
    assert caught.value.ids == ["a"]
    job = await queue.get("a")
    assert (job.due, job.payload) == (first.due, b"1")
    assert (await queue.stats()).waiting == 1


async def test_error_refuses_an_id_that_is_leased(queue):
    await queue.schedule(b"1", delay=0, id="a")
    claims = await queue.claim()
    with pytest.raises(JobExists):
        await queue.schedule(b"2", delay=5, id="a")
    assert (await queue.stats()).waiting == 0
    assert await queue.ack(claims) == 1
    assert (await queue.schedule(b"2", delay=5, id="a")).outcome is Outcome.SCHEDULED


@pytest.mark.parametrize("mode", ["error", "keep", "replace", "add"])
async def test_an_id_that_is_free_is_just_scheduled(queue, mode):
    job = await queue.schedule(b"1", delay=10, id="a", if_exists=mode)
    assert job.outcome is Outcome.SCHEDULED
    assert await queue.cancel("a") is Outcome.CANCELLED
    assert (await queue.schedule(b"1", delay=10, id="a", if_exists=mode)).outcome is Outcome.SCHEDULED


@pytest.mark.parametrize("mode", ["error", "keep", "replace", "add"])
async def test_a_dead_job_does_not_hold_its_id(queue, mode):
    await queue.schedule(b"dead", delay=0, id="a")
    await queue.fail(await queue.claim(), "bad", retry_in=None)
    job = await queue.schedule(b"new", delay=10, id="a", if_exists=mode)
    assert job.outcome is Outcome.SCHEDULED
    stats = await queue.stats()
    assert (stats.waiting, stats.dead) == (1, 1)
    assert (await queue.get("a")).payload == b"new"
    assert (await queue.dead_jobs()).jobs[0].payload == b"dead"


async def test_keep_answers_the_job_that_waits(queue):
    first = await queue.schedule(b"1", delay=10, id="a", meta={"k": "v"})
    job = await queue.schedule(b"2", delay=5, id="a", if_exists="keep")
    assert job.outcome is Outcome.KEPT
    assert (job.id, job.due, job.payload, job.meta, job.state) == ("a", first.due, b"1", {"k": "v"}, State.WAITING)
    assert (await queue.stats()).waiting == 1


async def test_keep_answers_the_leased_job_when_none_waits(queue):
    first = await queue.schedule(b"1", delay=0, id="a")
    await queue.claim()
    job = await queue.schedule(b"2", delay=5, id="a", if_exists="keep")
    assert (job.outcome, job.state, job.payload, job.due) == (Outcome.KEPT, State.LEASED, b"1", first.due)
    assert (await queue.stats()).waiting == 0


async def test_keep_prefers_the_earliest_waiting_entry_to_a_leased_one(queue):
    await queue.schedule(b"leased", delay=0, id="a")
    await queue.claim()
    await queue.schedule(b"late", delay=20, id="a", if_exists="add")
    await queue.schedule(b"early", delay=10, id="a", if_exists="add")
    job = await queue.schedule(b"no", delay=5, id="a", if_exists="keep")
    assert (job.outcome, job.state, job.payload) == (Outcome.KEPT, State.WAITING, b"early")


async def test_replace_takes_the_place_of_the_job_that_waits(queue, clock):
    await queue.schedule(b"1", delay=10, id="a", meta={"old": "1"})
    job = await queue.schedule(b"2", delay=20, id="a", if_exists="replace")
    assert (job.outcome, job.due, job.payload) == (Outcome.REPLACED, clock() + 20_000_000, b"2")
    assert (await queue.stats()).waiting == 1
    stored = await queue.get("a")
    assert (stored.due, stored.payload, stored.meta) == (clock() + 20_000_000, b"2", {})
    clock.advance(15)
    assert await queue.claim() == []
    clock.advance(5)
    assert [claim.payload for claim in await queue.claim()] == [b"2"]


async def test_replace_takes_the_place_of_every_waiting_entry(queue):
    for n in range(3):
        await queue.schedule(b"old%d" % n, delay=10 + n, id="a", if_exists="add")
    job = await queue.schedule(b"new", delay=5, id="a", if_exists="replace")
    assert job.outcome is Outcome.REPLACED
    assert [job.payload for job in (await queue.jobs()).jobs] == [b"new"]


async def test_add_keeps_both(queue, clock):
    await queue.schedule(b"1", delay=10, id="a")
    job = await queue.schedule(b"2", delay=5, id="a", if_exists="add")
    assert job.outcome is Outcome.SCHEDULED
    assert (await queue.stats()).waiting == 2
    assert (await queue.get("a")).payload == b"2"  # the earliest
    clock.advance(10)
    assert [claim.payload for claim in await queue.claim()] == [b"2", b"1"]


async def test_add_beside_a_leased_entry(queue):
    await queue.schedule(b"1", delay=0, id="a")
    (first,) = await queue.claim()
    assert (await queue.schedule(b"2", delay=0, id="a", if_exists="add")).outcome is Outcome.SCHEDULED
    (second,) = await queue.claim()
    assert first.entry != second.entry
    assert (second.id, second.payload) == ("a", b"2")


async def test_many_entries_of_an_id_live_and_leave_one_by_one(queue):
    for n in range(6):
        await queue.schedule(b"%d" % n, delay=0, id="a", if_exists="add")
    claims = await queue.claim()
    assert [claim.payload for claim in claims] == [b"%d" % n for n in range(6)]
    assert len({claim.entry for claim in claims}) == 6
    for n, claim in enumerate([claims[2], claims[0], claims[5], claims[4], claims[1]], 1):
        assert await queue.ack([claim]) == 1
        assert (await queue.stats()).leased == 6 - n
        assert (await queue.get("a")).state is State.LEASED
    assert (await queue.get("a")).payload == b"3"
    assert await queue.ack([claims[3]]) == 1
    assert await queue.get("a") is None


# ----------------------------------------------------------------------------- replace while the old one is leased


@pytest.fixture
async def replaced(queue):
    """The claim on a job which was replaced while it was leased."""
    await queue.schedule(b"old", delay=0, id="a")
    (claim,) = await queue.claim(lease=30)
    job = await queue.schedule(b"new", delay=100, id="a", if_exists="replace")
    assert job.outcome is Outcome.IN_FLIGHT
    assert (job.payload, job.state) == (b"new", State.WAITING)
    return claim


async def only_the_new_one_is_left(queue) -> bool:
    stats = await queue.stats()
    jobs = (await queue.jobs()).jobs
    return (stats.waiting, stats.leased, stats.dead) == (1, 0, 0) and [job.payload for job in jobs] == [b"new"]


async def test_the_ack_of_a_job_replaced_meanwhile_is_a_no_op(queue, replaced):
    assert await queue.ack([replaced]) == 0
    assert await only_the_new_one_is_left(queue)


@pytest.mark.parametrize("retry_in", [None, 1])
async def test_a_failed_publish_does_not_bring_a_replaced_job_back(queue, replaced, retry_in):
    assert await queue.fail([replaced], "bad", retry_in=retry_in) == 0
    assert await only_the_new_one_is_left(queue)


async def test_neither_does_giving_it_back_or_renewing_it(queue, replaced):
    assert await queue.give_back([replaced]) == 0
    assert await queue.renew([replaced], lease=60) == []
    assert await only_the_new_one_is_left(queue)


async def test_nor_does_the_end_of_its_lease(queue, replaced, clock):
    clock.advance(60)
    assert await queue.claim() == []
    assert await only_the_new_one_is_left(queue)
    clock.advance(60)
    (claim,) = await queue.claim()
    assert (claim.payload, claim.requeues, claim.attempts) == (b"new", 0, 0)


async def test_replace_with_one_entry_leased_and_others_waiting_says_in_flight_and_replaces_all(queue):
    await queue.schedule(b"leased", delay=0, id="a")
    (old,) = await queue.claim()
    await queue.schedule(b"waiting", delay=50, id="a", if_exists="add")
    job = await queue.schedule(b"new", delay=100, id="a", if_exists="replace")
    assert job.outcome is Outcome.IN_FLIGHT
    assert await queue.ack([old]) == 0
    assert await only_the_new_one_is_left(queue)


# --------------------------------------------------------------------- scheduled again while its first entry is leased


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "second-first"])
async def test_the_same_id_scheduled_again_while_leased_is_acked_in_either_order(queue, order):
    await queue.schedule(b"0", delay=0, id="a")
    first = await queue.claim()
    await queue.schedule(b"1", delay=0, id="a", if_exists="add")
    claims = [*first, *await queue.claim()]
    assert [claim.payload for claim in claims] == [b"0", b"1"]
    assert await queue.ack([claims[order[0]]]) == 1
    assert (await queue.get("a")).payload == claims[order[1]].payload
    assert await queue.cancel("a") is Outcome.IN_FLIGHT
    assert await queue.ack([claims[order[1]]]) == 1
    assert await queue.get("a") is None
    assert await queue.cancel("a") is Outcome.RELEASED


async def test_the_first_entrys_ack_leaves_the_second_waiting(queue, clock):
    await queue.schedule(b"0", delay=0, id="a")
    first = await queue.claim()
    await queue.schedule(b"1", delay=9, id="a", if_exists="add", meta={"n": "1"})
    assert await queue.ack(first) == 1
    job = await queue.get("a")
    assert (job.payload, job.meta, job.state) == (b"1", {"n": "1"}, State.WAITING)
    with pytest.raises(JobExists):
        await queue.schedule(b"2", delay=9, id="a")
    clock.advance(9)
    second = await queue.claim()
    assert [claim.payload for claim in second] == [b"1"]
    assert await queue.ack(first) == 0
    assert await queue.ack(second) == 1


# --------------------------------------------------------------------------------------------------------- batches


async def test_a_batch_answers_in_its_own_order_whatever_the_due_times(queue, clock):
    items = [
        NewJob(b"3", delay=3, id="c"),
        NewJob(b"1", at=clock.datetime + timedelta(seconds=1), id="a"),
        NewJob(b"2", delay=timedelta(seconds=2), id="b", meta={"k": "v"}),
        NewJob(b"now", delay=-5),
    ]
    jobs = await queue.schedule_many(items)
    assert [job.payload for job in jobs] == [b"3", b"1", b"2", b"now"]
    assert [job.due - clock() for job in jobs] == [3_000_000, 1_000_000, 2_000_000, 0]
    assert {job.outcome for job in jobs} == {Outcome.SCHEDULED}
    assert [job.payload for job in (await queue.jobs()).jobs] == [b"now", b"1", b"2", b"3"]
    assert (await queue.get("b")).meta == {"k": "v"}


async def test_a_batch_may_be_empty_or_a_generator(queue):
    assert await queue.schedule_many([]) == []
    jobs = await queue.schedule_many(NewJob(b"%d" % n, delay=1, id=str(n)) for n in range(3))
    assert [job.id for job in jobs] == ["0", "1", "2"]


async def test_a_batch_with_an_id_that_is_taken_stores_nothing(queue):
    await queue.schedule(b"there", delay=9, id="b")
    with pytest.raises(JobExists) as caught:
        await queue.schedule_many([NewJob(id.encode(), delay=1, id=id) for id in "abc"])
    assert caught.value.ids == ["b"]
    assert await ids_of(queue) == ["b"]
    assert await queue.get("a") is None


async def test_a_batch_that_repeats_an_id_stores_nothing(queue):
    with pytest.raises(JobExists) as caught:
        await queue.schedule_many([NewJob(b"1", delay=1, id="a"), NewJob(b"2", delay=2, id="a")])
    assert caught.value.ids == ["a"]
    assert (await queue.stats()).waiting == 0


async def test_a_batch_with_a_bad_item_stores_nothing(queue):
    with pytest.raises(ValueError, match="delay"):
        await queue.schedule_many([NewJob(b"1", delay=1, id="a"), NewJob(b"2", delay=float("nan"), id="b")])
    assert (await queue.stats()).waiting == 0


async def test_a_batch_that_keeps(queue):
    first = await queue.schedule(b"there", delay=9, id="b")
    jobs = await queue.schedule_many(
        [
            NewJob(b"a1", delay=1, id="a"),
            NewJob(b"b1", delay=1, id="b"),
            NewJob(b"a2", delay=2, id="a"),
            NewJob(b"c1", delay=3, id="c"),
        ],
        if_exists="keep",
    )
    assert [job.outcome for job in jobs] == [Outcome.SCHEDULED, Outcome.KEPT, Outcome.KEPT, Outcome.SCHEDULED]
    assert [job.payload for job in jobs] == [b"a1", b"there", b"a1", b"c1"]
    assert [jobs[1].due, jobs[2].due] == [first.due, jobs[0].due]
    assert await ids_of(queue) == ["a", "c", "b"]


async def test_a_batch_that_keeps_a_leased_job_twice(queue):
    await queue.schedule(b"leased", delay=0, id="a")
    await queue.claim()
    jobs = await queue.schedule_many([NewJob(b"1", delay=1, id="a"), NewJob(b"2", delay=2, id="a")], if_exists="keep")
    assert [(job.outcome, job.state, job.payload) for job in jobs] == [(Outcome.KEPT, State.LEASED, b"leased")] * 2


async def test_a_batch_that_replaces(queue, clock):
    await queue.schedule(b"there", delay=9, id="b")
    jobs = await queue.schedule_many(
        [
            NewJob(b"a1", delay=1, id="a"),
            NewJob(b"b1", delay=2, id="b"),
            NewJob(b"a2", delay=3, id="a"),
            NewJob(b"a3", delay=1, id="a"),
        ],
        if_exists="replace",
    )
    assert [job.outcome for job in jobs] == [Outcome.SCHEDULED, Outcome.REPLACED, Outcome.REPLACED, Outcome.REPLACED]
    assert [job.payload for job in (await queue.jobs()).jobs] == [b"a3", b"b1"]
    clock.advance(10)
    claims = await queue.claim()
    assert [claim.payload for claim in claims] == [b"a3", b"b1"]
    assert await queue.ack(claims) == 2
    assert await queue.get("a") is None


async def test_a_batch_that_replaces_a_leased_job(queue):
    await queue.schedule(b"old", delay=0, id="a")
    claims = await queue.claim()
    jobs = await queue.schedule_many(
        [NewJob(b"1", delay=1, id="a"), NewJob(b"2", delay=2, id="a")], if_exists="replace"
    )
    assert jobs[0].outcome is Outcome.IN_FLIGHT
    assert await queue.ack(claims) == 0
    assert [job.payload for job in (await queue.jobs()).jobs] == [b"2"]


async def test_a_batch_that_adds(queue, clock):
    jobs = await queue.schedule_many([NewJob(b"%d" % n, delay=1, id="a") for n in range(5)], if_exists="add")
    assert {job.outcome for job in jobs} == {Outcome.SCHEDULED}
    clock.advance(1)
    claims = await queue.claim()
    assert [claim.payload for claim in claims] == [b"%d" % n for n in range(5)]
    assert await queue.ack(claims) == 5
    assert await queue.get("a") is None


async def test_replace_after_a_batch_that_adds(queue):
    await queue.schedule_many([NewJob(b"%d" % n, delay=1, id="a") for n in range(3)], if_exists="add")
    assert (await queue.schedule(b"new", delay=1, id="a", if_exists="replace")).outcome is Outcome.REPLACED
    assert (await queue.stats()).waiting == 1
    assert await queue.cancel("a") is Outcome.CANCELLED
    assert await queue.get("a") is None


async def test_a_batch_larger_than_a_round_trip(queue):
    items = [NewJob(b"%d" % n, delay=n % 7, id=str(n)) for n in range(1234)]
    jobs = await queue.schedule_many(items)
    assert [job.id for job in jobs] == [item.id for item in items]
    assert (await queue.stats()).waiting == 1234
