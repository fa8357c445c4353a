"""Records and members that are not ours, or not whole: set aside or dropped with a note. Everything else goes on."""

from __future__ import annotations

import itertools

import msgpack
import pytest

from delayadapters import NewJob, Outcome, RecordUnreadable, State
from delayadapters.redis import commands, records
from delayadapters.redis.commands import Asker
from delaytests.raw import content, keys_of, send

_calls = itertools.count(1)


def section(value):
    packed = value if isinstance(value, bytes) else msgpack.packb(value, use_bin_type=False)
    return len(packed).to_bytes(4, "big") + packed


HEAD = b"\0\0\0\0\0\x02" + (1_893_456_000_000_000).to_bytes(7, "big")
STATE, META, DIRECT = 0x11, 0x12, 0x14

UNREADABLE = {
    "empty": b"",
    "text": b"not one of ours",
    "short": b"\x10abc",
    "a byte short of a head": b"\x10" + HEAD[:-1],
    "zeros": bytes(40),
    "newer version": b"\x20" + HEAD + b"payload",
    "much newer version": b"\xf0" + HEAD + b"payload",
    "no version": b"\x00" + HEAD + b"payload",
    "json": b'{"task": "something", "args": [1, 2, 3], "kwargs": {}}',
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
    "state: missing": bytes([STATE]) + HEAD,
    "state: length cut": bytes([STATE]) + HEAD + b"\0\0",
    "state: cut": bytes([STATE]) + HEAD + section([1, 2, b"why", 0])[:-1],
    "state: too long": bytes([STATE]) + HEAD + b"\xff\xff\xff\xff" + b"payload",
    "state: no msgpack": bytes([STATE]) + HEAD + section(b"\xc1\xc1") + b"payload",
    "state: cut msgpack": bytes([STATE]) + HEAD + section(b"\x94\x01") + b"payload",
    "state: two values": bytes([STATE]) + HEAD + section(b"\x90\x90") + b"payload",
    "state: number": bytes([STATE]) + HEAD + section(7) + b"payload",
    "state: empty list": bytes([STATE]) + HEAD + section([]) + b"payload",
    "state: short list": bytes([STATE]) + HEAD + section([1, 2]) + b"payload",
    "state: map": bytes([STATE]) + HEAD + section({"a": 1}) + b"payload",
    "state: texts": bytes([STATE]) + HEAD + section(["a", "b", "c", "d"]) + b"payload",
    "state: nil": bytes([STATE]) + HEAD + section(b"\xc0") + b"payload",
    "meta: missing": bytes([META]) + HEAD,
    "meta: cut": bytes([META]) + HEAD + section({"a": "b"})[:-1],
    "meta: too long": bytes([META]) + HEAD + b"\x7f\xff\xff\xff{}",
    "meta: no msgpack": bytes([META]) + HEAD + section(b"\xc1") + b"payload",
    "meta: not text": bytes([META]) + HEAD + section(b"\x81\xa1\xff\xa1\xff") + b"payload",
    "state and meta cut": bytes([STATE | META]) + HEAD + section([1, 2, b"why", 0]) + b"\0\0\0\x09",
}


@pytest.fixture
def queue(make_queue, clock):
    return make_queue(clock=clock)


def turn(queue, client, **options):
    """One claim of a release loop, and what the loop does with entries it cannot read."""
    keys = keys_of(queue)
    options = {"lease": 30_000_000, "limit": 100, "now": queue._clock()} | options
    got = send(client, commands.claim(keys, Asker.new(), next(_calls), **options))
    if got.unreadable:
        verdicts = [commands.Verdict(entry, "dead", 0, reason) for entry, reason in got.unreadable.items()]
        send(client, commands.settle(keys, got.lease, verdicts, queue._clock()))
    return got


def spoil(queue, client, id, record):
    assert client.hexists(keys_of(queue).entries, id)
    client.hset(keys_of(queue).entries, id, record)


# --------------------------------------------------------------------------------------------------------- unreadable


@pytest.mark.parametrize("what", UNREADABLE)
def test_unpacking_says_that_a_record_is_unreadable(what):
    with pytest.raises(RecordUnreadable):
        records.unpack(UNREADABLE[what])


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_unreadable_record_is_dead_and_the_others_go_on(queue, redis_client, what):
    queue.schedule(b"before", delay=0, id="before")
    queue.schedule(b"x", delay=0, id="bad")
    queue.schedule(b"after", delay=0, id="after")
    spoil(queue, redis_client, "bad", UNREADABLE[what])
    got = turn(queue, redis_client)
    assert [claim.id for claim in got.claims] == ["before", "after"]
    job = queue.get("bad")
    assert job.state is State.DEAD
    assert "unreadable" in job.reason
    assert (queue.stats().dead, queue.stats().leased, queue.stats().waiting) == (1, 2, 0)
    (listed,) = queue.dead_jobs().jobs
    assert (listed.id, listed.state, bool(listed.reason)) == ("bad", State.DEAD, True)
    # It is kept whole, for whoever can read it; replayed it comes to the same end, without a loop.
    stored = redis_client.hget(keys_of(queue).entries, "bad")
    assert stored.endswith((UNREADABLE[what], UNREADABLE[what][14:][-4:]))
    assert queue.replay("bad") is Outcome.REPLAYED
    assert turn(queue, redis_client).claims == []
    assert queue.get("bad").state is State.DEAD
    assert turn(queue, redis_client).notes == ()
    assert queue.discard("bad") is Outcome.DISCARDED
    assert queue.get("bad") is None
    assert queue.ack(got.claims) == 2
    assert content(redis_client, keys_of(queue).entries) is None


@pytest.mark.parametrize("what", UNREADABLE)
def test_the_verb_claim_sets_an_unreadable_record_aside(queue, redis_client, what):
    queue.schedule_many([NewJob(b"x", 0, id="bad"), NewJob(b"y", 0, id="good")])
    spoil(queue, redis_client, "bad", UNREADABLE[what])
    assert [claim.id for claim in queue.claim()] == ["good"]
    assert queue.get("bad").state is State.DEAD


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_record_spoilt_while_it_is_leased(queue, redis_client, clock, what):
    queue.schedule_many([NewJob(b"x", 0, id="bad"), NewJob(b"y", 0, id="good")])
    queue.claim(lease=1)
    spoil(queue, redis_client, "bad", UNREADABLE[what])
    clock.advance(2)
    got = turn(queue, redis_client)
    assert [claim.id for claim in got.claims] == ["good"]
    assert queue.get("bad").state is State.DEAD
    # And the same for whoever still holds it.
    (claim,) = got.claims
    spoil(queue, redis_client, "good", UNREADABLE[what])
    assert queue.fail([claim], "why", retry_in=1) == 1
    clock.advance(2)
    turn(queue, redis_client)
    assert queue.get("good").state is State.DEAD


@pytest.mark.parametrize("verb", ["ack", "give_back", "fail"])
@pytest.mark.parametrize("what", UNREADABLE)
def test_whoever_holds_a_spoilt_record_can_end_it(queue, redis_client, what, verb):
    queue.schedule(b"x", delay=0, id="bad")
    claims = queue.claim()
    spoil(queue, redis_client, "bad", UNREADABLE[what])
    if verb == "fail":
        assert queue.fail(claims, "why", retry_in=None) == 1
        assert queue.get("bad").state is State.DEAD
        assert queue.discard("bad") is Outcome.DISCARDED
    elif verb == "ack":
        assert queue.ack(claims) == 1
    else:
        assert queue.give_back(claims) == 1
        turn(queue, redis_client)
        assert queue.get("bad").state is State.DEAD
        assert queue.discard("bad") is Outcome.DISCARDED
    assert queue.stats().leased == 0
    assert content(redis_client, keys_of(queue).entries) is None


@pytest.mark.parametrize("what", UNREADABLE)
def test_looking_at_and_changing_a_job_with_an_unreadable_record(queue, redis_client, what):
    """Nothing raises. By its id it may not be found, as the record held its number; scheduling it again works."""
    queue.schedule(b"x", delay=5, id="bad")
    queue.schedule(b"y", delay=6, id="good")
    spoil(queue, redis_client, "bad", UNREADABLE[what])
    first, second = queue.jobs().jobs
    assert (first.id, second.id) == ("bad", "good")
    assert first.reason
    assert queue.stats().waiting == 2
    queue.get("bad")
    assert queue.reschedule("bad", delay=7) in (Outcome.RESCHEDULED, Outcome.NOT_FOUND)
    assert queue.schedule(b"z", delay=1, id="bad", if_exists="replace").outcome in (Outcome.SCHEDULED, Outcome.REPLACED)
    assert queue.get("bad").payload == b"z"
    assert queue.cancel("bad") is Outcome.CANCELLED
    assert queue.get("bad") is None


@pytest.mark.parametrize("flags", [b"\x10", bytes([STATE]), bytes([META]), bytes([DIRECT])])
@pytest.mark.parametrize("due", [0, 2**53 + 1, 2**56 - 1])
def test_a_foreign_due_time_is_no_fault(queue, redis_client, flags, due):
    body = {
        b"\x10": b"",
        bytes([STATE]): section([0, 0, b"", 0]),
        bytes([META]): section({}),
        bytes([DIRECT]): section([]),
    }
    queue.schedule(b"x", delay=0, id="odd")
    number = redis_client.hget(keys_of(queue).entries, "odd")[1:7]
    spoil(queue, redis_client, "odd", flags + number + due.to_bytes(7, "big") + body[flags] + b"pay")
    got = turn(queue, redis_client)
    assert got.direct + len(got.claims) == 1
    if got.claims:
        assert queue.give_back(got.claims) == 1
        assert queue.cancel("odd") is Outcome.CANCELLED


# ----------------------------------------------------------------------------------------- members that are not ours


@pytest.mark.parametrize(
    "member", [b"", b"a", b"abcdef", b"abcde\x01", b"\xff" * 6, b"longer than seven bytes"], ids=repr
)
def test_a_member_without_a_record_is_dropped_with_a_note(queue, redis_client, member):
    keys = keys_of(queue)
    queue.schedule(b"x", delay=0)
    redis_client.zadd(keys.due, {member: 5})
    got = turn(queue, redis_client)
    assert [claim.payload for claim in got.claims] == [b"x"]
    assert [(what, reason) for _, what, reason in got.notes] == [("dropped", "no record")]
    assert queue.stats().waiting == 0
    queue.ack(got.claims)
    # The same under a lease that passes.
    redis_client.zadd(keys.leased, {member: 5})
    got = turn(queue, redis_client)
    assert [(what, reason) for _, what, reason in got.notes] == [("dropped", "no record")]
    assert queue.stats().leased == 0


@pytest.mark.parametrize("member", [b"", b"a", b"abcdef", b"\xff" * 9], ids=repr)
def test_members_that_are_not_ours_are_no_hindrance_to_looking(queue, redis_client, member):
    keys = keys_of(queue)
    for key in (keys.due, keys.dead):
        redis_client.zadd(key, {member: 5})
    assert len(queue.jobs().jobs) == len(queue.dead_jobs().jobs) == 1
    assert queue.jobs().jobs[0].reason
    assert queue.stats().waiting == queue.stats().dead == 1
    queue.schedule(b"x", delay=3, id="a")
    page = queue.jobs(limit=1)
    rest = queue.jobs(limit=1, cursor=page.cursor)
    assert [job.id for job in rest.jobs] == ["a"]


def test_an_id_that_is_no_text_is_dead(queue, redis_client):
    keys = keys_of(queue)
    number = b"\0\0\0\0\0\x02"
    redis_client.zadd(keys.due, {number + b"\xc3\x28": 5})
    redis_client.hset(keys.entries, b"\xc3\x28", b"\x10" + number + bytes(7) + b"pay")
    queue.schedule(b"x", delay=0, id="a")
    got = turn(queue, redis_client)
    assert [claim.id for claim in got.claims] == ["a"]
    (job,) = queue.dead_jobs().jobs
    assert (job.id, job.payload) == ("�(", b"pay")
    assert "decode" in job.reason


def test_a_record_without_a_member_does_not_block_its_id(queue, redis_client):
    keys = keys_of(queue)
    for mode in ("error", "keep", "replace", "add"):
        queue.schedule(b"lost", delay=5, id="a")
        redis_client.delete(keys.due)
        assert queue.get("a") is None
        assert queue.cancel("a") is Outcome.NOT_FOUND
        assert queue.schedule(b"new", delay=5, id="a", if_exists=mode).outcome is Outcome.SCHEDULED
        assert queue.get("a").payload == b"new"
        assert queue.cancel("a") is Outcome.CANCELLED
        assert content(redis_client, keys.entries) is None


def test_a_number_that_points_to_nothing_is_no_hindrance(queue, redis_client):
    """The list of further entries names some that are gone (records removed by hand)."""
    keys = keys_of(queue)
    for n in range(4):
        queue.schedule(b"%d" % n, delay=n, id="a", if_exists="add")
    for field in redis_client.hkeys(keys.entries):
        if field.startswith(b"\xfe") and redis_client.hget(keys.entries, field).endswith(b"2"):
            redis_client.hdel(keys.entries, field)
    assert queue.get("a").payload == b"0"
    assert queue.cancel("a") is Outcome.CANCELLED
    got = turn(queue, redis_client)
    assert got.claims == []
    queue._clock.advance(9)
    got = turn(queue, redis_client)
    assert [what for _, what, _ in got.notes] == ["dropped"]


@pytest.mark.parametrize("first", ["member", "record"])
def test_a_member_and_a_record_of_different_schedulings_do_not_loop(queue, redis_client, clock, first):
    """A partial restore: the record under an id belongs to another entry than the one that is due."""
    keys = keys_of(queue)
    queue.schedule(b"old", delay=1, id="a")
    old = redis_client.zrange(keys.due, 0, 0)[0]
    queue.schedule(b"new", delay=5, id="a", if_exists="replace")
    redis_client.zadd(keys.due, {old: clock() + (1 if first == "member" else 9) * 1_000_000})
    clock.advance(20)
    released = []
    for _ in range(4):
        got = turn(queue, redis_client)
        released += [claim.payload for claim in got.claims]
        queue.ack(got.claims)
    assert released in ([b"new"], [b"new", b"new"])
    assert (queue.stats().waiting, queue.stats().leased) == (0, 0)
    assert content(redis_client, keys.entries) is None


def test_a_cancelled_id_is_not_released_through_a_stray_member(queue, redis_client, clock):
    keys = keys_of(queue)
    queue.schedule(b"old", delay=1, id="a")
    old = redis_client.zrange(keys.due, 0, 0)[0]
    queue.schedule(b"new", delay=5, id="a", if_exists="replace")
    redis_client.zadd(keys.due, {old: clock()})
    assert queue.cancel("a") is Outcome.CANCELLED
    clock.advance(20)
    got = turn(queue, redis_client)
    assert got.claims == []
    assert [what for _, what, _ in got.notes] == ["dropped"]


def test_an_entry_in_two_sets_ends_once(queue, redis_client, clock):
    """Leased, and put back among the waiting by hand."""
    keys = keys_of(queue)
    queue.schedule(b"x", delay=0, id="a")
    (claim,) = queue.claim()
    redis_client.zadd(keys.due, {claim.entry: clock()})
    again = queue.claim()
    assert [one.entry for one in again] == [claim.entry]
    assert queue.ack([claim]) + queue.ack(again) == 1
    assert queue.get("a") is None
    assert turn(queue, redis_client).claims == []


def test_many_bad_ones_at_once_leave_the_batch_moving(queue, redis_client):
    keys = keys_of(queue)
    queue.schedule_many([NewJob(b"%d" % n, 0, id=f"j{n}") for n in range(300)])
    kinds = list(UNREADABLE.values())
    for n in range(0, 300, 2):
        spoil(queue, redis_client, f"j{n}", kinds[n // 2 % len(kinds)])
    redis_client.zadd(keys.due, {b"stray%d" % n: 1 for n in range(20)})
    seen = []
    for _ in range(5):
        got = turn(queue, redis_client)
        seen += [claim.id for claim in got.claims]
    assert seen == [f"j{n}" for n in range(1, 300, 2)]
    assert (queue.stats().dead, queue.stats().waiting) == (150, 0)
