"""Direct release: the script that removes the entry runs the broker's commands. Once, in order, faults one by one."""

from __future__ import annotations

import dataclasses
import itertools
import random
from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import Claim, NewJob, Outcome, Payload, State
from delayadapters.redis import commands, sync
from delayadapters.redis.commands import Asker
from delaytests.raw import content, keys_of, send

_calls = itertools.count(1)


@pytest.fixture
def broker(redis_client, queue_name):
    """A prefix for keys of the broker; they are gone after the test."""
    prefix = f"broker-{queue_name}:"
    yield prefix
    for key in redis_client.scan_iter(match=prefix + "*"):
        redis_client.delete(key)


@pytest.fixture
def queue(make_queue, clock):
    return make_queue(clock=clock)


def turn(queue, client, **options):
    """One claim of a release loop, as it is answered."""
    options = {"lease": 30_000_000, "limit": 100, "now": queue._clock()} | options
    return send(client, commands.claim(keys_of(queue), Asker.new(), next(_calls), **options))


def push(key, value=Payload.BYTES, verb="LPUSH"):
    return [(verb, key, value)]


# ------------------------------------------------------------------------------------------------------------- order


def test_pushes_keep_their_order_over_runs_of_keys_and_verbs(queue, clock, redis_client, broker):
    one, two = broker + "one", broker + "two"
    plan = [(one, "RPUSH")] * 3 + [(two, "RPUSH")] * 2 + [(two, "LPUSH")] * 3 + [(one, "RPUSH")] * 2
    queue.schedule_many([NewJob(b"%d" % n, n + 1, release=push(key, verb=verb)) for n, (key, verb) in enumerate(plan)])
    clock.advance(60)
    assert turn(queue, redis_client).direct == 10
    assert content(redis_client, one) == [b"0", b"1", b"2", b"8", b"9"]
    assert content(redis_client, two) == [b"7", b"6", b"5", b"3", b"4"]
    stats = queue.stats()
    assert (stats.waiting, stats.leased, stats.dead) == (0, 0, 0)


def test_a_run_of_pushes_is_one_command(queue, clock, redis_client, broker):
    key = broker + "q"
    queue.schedule_many([NewJob(b"%d" % n, 0, release=push(key)) for n in range(50)])
    redis_client.config_resetstat()
    assert turn(queue, redis_client).direct == 50
    assert redis_client.info("commandstats")["cmdstat_lpush"]["calls"] == 1
    assert content(redis_client, key) == [b"%d" % n for n in reversed(range(50))]


def test_a_thousand_at_once(queue, redis_client, broker):
    key = broker + "q"
    queue.schedule_many([NewJob(b"%d" % n, 0, release=push(key, verb="RPUSH")) for n in range(1000)])
    assert turn(queue, redis_client, limit=1000).direct == 1000
    assert content(redis_client, key) == [b"%d" % n for n in range(1000)]


def test_commands_that_are_no_push_come_between_in_due_order(queue, clock, redis_client, broker):
    key = broker + "q"
    jobs = [NewJob(b"%d" % n, n + 1, release=push(key, verb="RPUSH")) for n in range(6)]
    jobs[3] = NewJob(b"3", 4, release=[("COPY", key, broker + "copy")])
    queue.schedule_many(jobs)
    clock.advance(60)
    assert turn(queue, redis_client).direct == 6
    assert content(redis_client, broker + "copy") == [b"0", b"1", b"2"]
    assert content(redis_client, key) == [b"0", b"1", b"2", b"4", b"5"]


def test_direct_and_leased_jobs_share_one_due_order(queue, clock, redis_client, broker):
    key = broker + "q"
    queue.schedule_many(
        [NewJob(b"%d" % n, n + 1, release=push(key, verb="RPUSH") if n % 2 else None) for n in range(10)]
    )
    clock.advance(60)
    got = turn(queue, redis_client, limit=5)
    assert [claim.payload for claim in got.claims] == [b"0", b"2", b"4"]
    assert content(redis_client, key) == [b"1", b"3"]
    got = turn(queue, redis_client)
    assert [claim.payload for claim in got.claims] == [b"6", b"8"]
    assert content(redis_client, key) == [b"1", b"3", b"5", b"7", b"9"]


def test_a_direct_job_is_never_early(queue, clock, redis_client, broker):
    queue.schedule(b"x", delay=5, release=push(broker + "q"))
    clock.advance(5, micros=-1)
    assert turn(queue, redis_client).direct == 0
    clock.advance(micros=1)
    got = turn(queue, redis_client)
    assert (got.direct, got.latest) == (1, 0)
    queue.schedule(b"x", delay=5, release=push(broker + "q"))
    clock.advance(7)
    assert turn(queue, redis_client).latest == 2_000_000


def test_the_verb_claim_releases_directly_as_well(queue, redis_client, broker):
    queue.schedule(b"x", delay=0, id="a", release=push(broker + "q"))
    assert queue.claim() == []
    assert content(redis_client, broker + "q") == [b"x"]
    assert queue.cancel("a") is Outcome.RELEASED


# --------------------------------------------------------------------------------------------------- what is released


def test_several_commands_run_in_order(queue, redis_client, broker):
    queue.schedule(
        b"pay",
        delay=0,
        release=[
            ("SET", broker + "a", Payload.BYTES),
            ("APPEND", broker + "a", "-more"),
            ("HSET", broker + "h", "field", 7, b"\xff\x00", Payload.BYTES),
            ("ZADD", broker + "z", 12, "member"),
        ],
    )
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, broker + "a") == b"pay-more"
    assert content(redis_client, broker + "h") == {b"field": b"7", b"\xff\x00": b"pay"}
    assert content(redis_client, broker + "z") == [(b"member", 12)]


@pytest.mark.parametrize("value", [bytes(range(256)), b"\r\n$-1\r\n", "ä€🙂", b"", 0, -1, 2**62], ids=repr)
def test_values_are_binary_safe(queue, redis_client, broker, value):
    payload = bytes(range(256)) + b"\r\n"
    release = [
        ("SET", broker + "a", value),
        ("SET", broker + "b", Payload.BYTES),
        ("SET", broker + "c", [value, value]),
    ]
    queue.schedule(payload, delay=0, meta={"ä": "€"}, release=release)
    assert turn(queue, redis_client).direct == 1
    raw = value if isinstance(value, bytes) else str(value).encode()
    assert content(redis_client, broker + "a") == raw
    assert content(redis_client, broker + "b") == payload
    assert content(redis_client, broker + "c") == raw * 2


def test_stand_ins_are_filled_in_at_release(queue, clock, redis_client, broker):
    clock.set(1_764_437_836_123_999)
    job = queue.schedule(
        b"pay",
        delay=10,
        release=[
            ("SET", broker + "due", Payload.DUE_MS),
            ("SET", broker + "now", Payload.NOW_MS),
            ("SET", broker + "nested", ["<", [Payload.BYTES, ["|", Payload.DUE_MS]], 5, ">"]),
            ("SET", [broker, "key-", Payload.BYTES], ""),
        ],
    )
    clock.advance(12.5)
    assert turn(queue, redis_client).direct == 1
    due_ms, now_ms = b"%d" % (job.due // 1000), b"%d" % (clock() // 1000)
    assert content(redis_client, broker + "due") == due_ms == b"1764437846123"
    assert content(redis_client, broker + "now") == now_ms == b"1764437848623"
    assert content(redis_client, broker + "nested") == b"<pay|" + due_ms + b"5>"
    assert content(redis_client, broker + "key-pay") == b""


@pytest.mark.parametrize("how", ["reschedule", "release_now"])
def test_the_due_time_filled_in_follows_a_reschedule(queue, clock, redis_client, broker, how):
    queue.schedule(b"x", delay=10, id="a", release=[("SET", broker + "due", Payload.DUE_MS)])
    if how == "reschedule":
        queue.reschedule("a", delay=99)
        expected = clock() + 99_000_000
    else:
        clock.advance(3)
        queue.release_now("a")
        expected = clock()
    clock.advance(100)
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, broker + "due") == b"%d" % (expected // 1000)


def test_the_due_time_as_text_is_pythons(queue, clock, redis_client, broker):
    """Also within a frame around the payload, in a run of pushes to one list."""
    rnd = random.Random(7)
    first, last = 0, 8_835_000_000
    seconds = sorted({first + 1, last, *(rnd.randrange(first, last) for _ in range(300)), *LEAP_DAYS})
    moments = [datetime.fromtimestamp(n, timezone.utc) + timedelta(microseconds=n % 3 * 50) for n in seconds]
    clock.set(1)
    frame = ("RPUSH", broker + "q", ["<", Payload.BYTES, "|", Payload.DUE_ISO, "|", Payload.UNIQUE, ">"])
    for number, at in enumerate(moments):
        queue.schedule(b"%d" % number, at=at, id=f"job-{number}", release=[frame])
    clock.set((last + 10) * 1_000_000)
    while turn(queue, redis_client).direct:
        pass
    rows = [row.decode().strip("<>").split("|") for row in content(redis_client, broker + "q")]
    assert [row[:2] for row in rows] == [[str(n), at.isoformat()] for n, at in enumerate(moments)]
    assert len({row[2] for row in rows}) == len(moments)


LEAP_DAYS = [
    int(datetime(year, month, day, 23, 59, 59, tzinfo=timezone.utc).timestamp()) + more
    for year in (1972, 2000, 2024, 2100, 2200)
    for month, day in ((2, 28), (12, 31))
    for more in (0, 1, 86_400, 86_401)
]


def test_a_retry_keeps_the_due_time(queue, clock, redis_client, broker):
    job = queue.schedule(b"x", delay=10, id="a", release=[("RPUSH", broker + "q", Payload.DUE_MS)])
    redis_client.set(broker + "q", "in the way")
    clock.advance(10)
    assert turn(queue, redis_client).direct == 0
    assert queue.get("a").due == job.due
    redis_client.delete(broker + "q")
    clock.advance(10)
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, broker + "q") == [b"%d" % (job.due // 1000)]


def test_unique_differs_within_a_job_between_jobs_and_between_releases(queue, clock, redis_client, broker):
    key = broker + "q"
    twice = [("RPUSH", key, Payload.UNIQUE), ("RPUSH", key, [Payload.UNIQUE, "-", Payload.UNIQUE])]
    for n in range(20):
        queue.schedule(
            b"same", delay=0, id="same", if_exists="add", release=twice if n % 2 else push(key, Payload.UNIQUE)
        )
    assert turn(queue, redis_client).direct == 20
    clock.advance(1)
    queue.schedule(b"same", delay=0, id="same", release=twice)
    assert turn(queue, redis_client).direct == 1
    seen = [word for value in content(redis_client, key) for word in value.split(b"-")]
    assert len(seen) == 10 + 10 * 3 + 3
    assert len(set(seen)) == len(seen)
    assert all(len(word) == 32 and int(word, 16) >= 0 for word in seen)


def test_a_guard_ends_a_release_when_its_key_exists(queue, redis_client, broker):
    guarded = [
        ("RPUSH", broker + "log", "1"),
        (Payload.UNLESS_EXISTS, [broker, "stop"]),
        ("RPUSH", broker + "log", "2"),
    ]
    queue.schedule(b"x", delay=0, id="a", release=guarded)
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, broker + "log") == [b"1", b"2"]
    redis_client.set(broker + "stop", "")
    queue.schedule(b"x", delay=0, id="a", release=guarded)
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, broker + "log") == [b"1", b"2", b"1"]
    assert queue.get("a") is None


def test_a_retry_asks_a_guard_again_before_anything_behind_it_has_run(queue, clock, redis_client, broker):
    log, bad = broker + "log", broker + "bad"
    redis_client.set(bad, "in the way")
    guard = (Payload.UNLESS_EXISTS, broker + "stop")
    queue.schedule(b"x", delay=0, id="at-once", release=[guard, ("RPUSH", bad, "1"), ("RPUSH", log, "at-once")])
    queue.schedule(b"x", delay=0, id="begun", release=[guard, ("RPUSH", log, "begun"), ("RPUSH", bad, "2")])
    turn(queue, redis_client, retry_base=500_000)
    assert content(redis_client, log) == [b"begun"]
    redis_client.delete(bad)
    redis_client.set(broker + "stop", "")
    clock.advance(1)
    assert turn(queue, redis_client).direct == 2
    assert content(redis_client, log) == [b"begun"], "nothing was begun, so its guard counts"
    assert content(redis_client, bad) == [b"2"], "begun: it goes on"
    assert queue.stats().waiting == 0


@pytest.mark.parametrize(
    "release", [[], (), "", [[]], [()], ["SET"], [b"SET"], [("SET", None)], [("SET", 1.5)], [("SET", {})]]
)
def test_a_release_that_is_none_is_refused(queue, redis_client, release):
    with pytest.raises((TypeError, ValueError), match="release"):
        queue.schedule(b"x", delay=0, release=release)
    assert redis_client.dbsize() == 0


# ------------------------------------------------------------------------------------------------------------ at fault


def test_a_wrong_type_under_the_brokers_key_holds_up_that_key_alone(queue, clock, redis_client, broker):
    bad, good = broker + "bad", broker + "good"
    redis_client.set(bad, "in the way")
    queue.schedule_many(
        [NewJob(b"%d" % n, n + 1, id=f"j{n}", release=push(bad if n % 2 else good, verb="RPUSH")) for n in range(6)]
    )
    queue.schedule(b"leased", delay=7)
    clock.advance(60)
    start = clock()
    got = turn(queue, redis_client)
    assert got.direct == 3
    assert [claim.payload for claim in got.claims] == [b"leased"]
    assert content(redis_client, good) == [b"0", b"2", b"4"]
    assert {(id, what) for id, what, _ in got.notes} == {("j1", "retry"), ("j3", "retry"), ("j5", "retry")}
    assert all("WRONGTYPE" in reason for _, _, reason in got.notes)
    # Backoff doubles from retry_base to retry_cap.
    pauses = []
    for _ in range(5):
        job = queue.get("j1")
        assert (job.state, "WRONGTYPE" in job.reason) == (State.WAITING, True)
        at = int(redis_client.zscore(keys_of(queue).due, entry_of(queue, redis_client, "j1")))
        pauses.append(at - start)
        clock.set(at - 1)
        assert turn(queue, redis_client).notes == ()
        clock.set(at)
        start = clock()
        turn(queue, redis_client, retry_cap=5_000_000)
    assert pauses == [1_000_000, 2_000_000, 4_000_000, 5_000_000, 5_000_000]
    assert queue.get("j1").attempts == 6
    # And dead at max_attempts, with its reason; then replayed.
    clock.advance(10)
    got = turn(queue, redis_client, max_attempts=7)
    assert {what for _, what, _ in got.notes} == {"dead"}
    job = queue.get("j1")
    assert (job.state, job.attempts, job.payload) == (State.DEAD, 7, b"1")
    assert "WRONGTYPE" in job.reason
    redis_client.delete(bad)
    assert queue.replay("j1") is Outcome.REPLAYED
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, bad) == [b"1"]
    assert queue.discard("j3") is Outcome.DISCARDED


def entry_of(queue, client, id):
    (entry,) = [entry for entry in client.zrange(keys_of(queue).due, 0, -1) if entry[6:] == id.encode()]
    return entry


FAULTS = {
    "unknown command": ("NONSENSE", "x"),
    "wrong arity": ("SET", "x"),
    "no such subcommand": ("OBJECT", "NONSENSE", "x"),
    "not for scripts": ("SUBSCRIBE", "x"),
    "syntax": ("SET", "x", "y", "NONSENSE"),
    "not a number": ("INCRBY", "x", "NONSENSE"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_command_redis_refuses_is_the_jobs_own_fault(queue, clock, redis_client, broker, fault):
    queue.schedule(b"before", delay=0, release=push(broker + "q", verb="RPUSH"))
    queue.schedule(b"bad", delay=0, id="bad", release=[FAULTS[fault]])
    queue.schedule(b"after", delay=0, release=push(broker + "q", verb="RPUSH"))
    got = turn(queue, redis_client)
    assert got.direct == 2
    assert content(redis_client, broker + "q") == [b"before", b"after"]
    assert [(id, what) for id, what, _ in got.notes] == [("bad", "retry")]
    clock.advance(1)
    got = turn(queue, redis_client, max_attempts=2)
    job = queue.get("bad")
    assert (job.state, job.attempts, job.payload) == (State.DEAD, 2, b"bad")
    assert job.reason == got.notes[0][2]
    assert len(job.reason) > 5


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_a_retry_goes_on_at_the_command_that_failed(queue, clock, redis_client, broker, k):
    log = broker + "log"
    release = [("RPUSH", log, str(n)) for n in range(4)]
    release[k] = ("RPUSH", broker + "bad", Payload.BYTES)
    redis_client.set(broker + "bad", "in the way")
    queue.schedule(b"x", delay=0, id="a", release=release)
    before = [str(n).encode() for n in range(k)] or None
    for _ in range(3):
        assert turn(queue, redis_client).direct == 0
        assert content(redis_client, log) == before
        clock.advance(300)
    # Dead and replayed: it still goes on there.
    turn(queue, redis_client, max_attempts=1)
    assert queue.get("a").state is State.DEAD
    redis_client.delete(broker + "bad")
    assert queue.replay("a") is Outcome.REPLAYED
    assert queue.get("a").attempts == 0
    assert turn(queue, redis_client).direct == 1
    assert content(redis_client, log) == [str(n).encode() for n in range(4) if n != k]
    assert content(redis_client, broker + "bad") == [b"x"]


@pytest.mark.parametrize(
    "section",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x07",
        b"\xc0",
        b"\xa3abc",
        b"\x93\x01\x02\x03",
        b"\x91\xa3abc",
        b"\x91\x92\xa3SET\x63",
        b"\x91\x93\xa3SET\xa1k\x91\x63",
        b"\x91\x93\xa5RPUSH\xa1k\x63",
        b"\x91\x93\xa5LPUSH\xa1k\xc0",
        b"\x91\x81\xa1a\xa1b",
        b"\xca\x00\x00\x00\x00",
    ],
    ids=bytes.hex,
)
def test_an_unreadable_commands_section_is_dead_at_once_or_by_its_attempts(queue, clock, redis_client, broker, section):
    job = queue.schedule(b"x", delay=0, id="bad", release=push(broker + "never"))
    queue.schedule(b"fine", delay=0, release=push(broker + "q"))
    keys = keys_of(queue)
    record = redis_client.hget(keys.entries, "bad")
    broken = record[:14] + len(section).to_bytes(4, "big") + section + b"x"
    redis_client.hset(keys.entries, "bad", broken)
    got = turn(queue, redis_client)
    assert got.direct == 1
    for _ in range(10):
        clock.advance(301)
        turn(queue, redis_client)
    dead = queue.get("bad")
    assert (dead.state, dead.payload, bool(dead.reason)) == (State.DEAD, b"x", True)
    assert content(redis_client, broker + "q") == [b"fine"]
    assert content(redis_client, broker + "never") is None
    assert content(redis_client, "k") is None
    assert dead.due == job.due
    assert queue.replay("bad") is Outcome.REPLAYED
    turn(queue, redis_client, max_attempts=1)
    assert queue.get("bad").state is State.DEAD
    assert queue.discard("bad") is Outcome.DISCARDED


def test_a_commands_section_cut_short_is_dead(queue, redis_client, broker):
    queue.schedule(b"", delay=0, id="bad", release=push(broker + "q"))
    keys = keys_of(queue)
    record = redis_client.hget(keys.entries, "bad")
    for length in (len(record) - 1, 20, 18, 17, 15, 14):
        redis_client.hset(keys.entries, "bad", record[:length])
        got = turn(queue, redis_client)
        assert [what for _, what, _ in got.notes] == ["dead"], length
        assert queue.get("bad").state is State.DEAD
        assert queue.replay("bad") is Outcome.REPLAYED
    turn(queue, redis_client)
    assert queue.discard("bad") is Outcome.DISCARDED


def test_without_the_right_to_the_brokers_key_the_job_waits(start_redis):
    server = start_redis()
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "u", "on", ">p", "~{delayadapters:*}:*", "~allowed", "&*", "+@all")
    from delayadapters import DelayQueue

    queue = DelayQueue(server.client(username="u", password="p"))
    queue.schedule(b"1", delay=0, id="no", release=[("RPUSH", "forbidden", "x")])
    queue.schedule(b"2", delay=0, id="yes", release=[("RPUSH", "allowed", "x")])
    assert queue.claim() == []
    assert admin.lrange("allowed", 0, -1) == [b"x"]
    assert not admin.exists("forbidden")
    job = queue.get("no")
    assert job.attempts == 1
    assert "key" in job.reason, job.reason


# --------------------------------------------------------------------------------------------------------- once


def test_a_lost_reply_and_a_repeated_claim_release_once(make_queue, make_proxy, redis_server, redis_client, broker):
    proxy = make_proxy(redis_server.port, redis_server.host)
    producer = make_queue()
    queue = make_queue(url=proxy.url, timeout=5)
    queue.stats()
    for n in range(7):
        producer.schedule(
            b"%d" % n, delay=0, id=f"j{n}", release=[("RPUSH", broker + "q", Payload.BYTES), ("INCR", broker + "n")]
        )
    producer.schedule(b"leased", delay=0)
    sha = queue_sha("claim")
    cut = proxy.cut_reply_after(lambda request: sha in request or b"EVAL" in request)
    claims = queue.claim()
    assert cut.happened == 1
    assert [claim.payload for claim in claims] == [b"leased"]
    assert content(redis_client, broker + "q") == [b"%d" % n for n in range(7)]
    assert content(redis_client, broker + "n") == b"7"
    assert isinstance(claims[0], Claim)


def queue_sha(name):
    from delayadapters.redis.scripts import load

    return load(name).sha


def test_a_repeated_claim_after_a_failed_release_charges_one_attempt(queue, redis_client, broker):
    redis_client.set(broker + "q", "in the way")
    queue.schedule(b"x", delay=0, id="a", release=push(broker + "q"))
    call = commands.claim(keys_of(queue), Asker.new(), 1, lease=10**6, limit=9, now=queue._clock())
    for _ in range(3):
        sync.execute(redis_client, call)
    assert queue.get("a").attempts == 1


def test_under_maxmemory_direct_release_drains(start_redis):
    from delayadapters import DelayQueue, OutOfMemory

    server = start_redis(maxmemory="6mb")
    client = server.client()
    queue = DelayQueue(client, max_payload=None)
    stored = 0
    with pytest.raises(OutOfMemory):  # noqa: PT012 - whichever comes to be refused
        while True:
            queue.schedule(bytes(50_000), delay=0, release=[("RPUSH", "q", "small"), ("INCR", "n")])
            stored += 1
    assert stored > 10
    released = 0
    while released < stored:
        before = queue.stats().waiting
        assert queue.claim() == []
        released += before - queue.stats().waiting
    assert client.llen("q") == stored
    assert client.get("n") == b"%d" % stored
    assert queue.schedule(b"x", delay=0).outcome is Outcome.SCHEDULED


# ---------------------------------------------------------------------------------------------------------- by bytes

MIB = 1 << 20


def sizes(batches):
    return [sum(len(claim.payload) for claim in batch) for batch in batches]


def drain(queue, **options):
    batches = []
    while True:
        claims = queue.claim(1000, **options)
        if not claims:
            return batches
        queue.ack(claims)
        batches.append(claims)


def test_large_payloads_due_together_come_a_few_at_a_time(queue, clock):
    for _ in range(8):
        queue.schedule(bytes(MIB), delay=0)
    assert [len(batch) for batch in drain(queue)] == [1] * 8
    for _ in range(40):
        queue.schedule(bytes(MIB // 10), delay=0)
    assert max(sizes(drain(queue))) <= MIB + MIB // 10


def test_large_payloads_behind_many_small_ones_come_a_few_at_a_time(queue, clock, redis_client):
    queue.schedule_many([NewJob(b"%d" % n, 0) for n in range(200)])
    for _ in range(20):
        queue.schedule(bytes(MIB), delay=0)
    batches = drain(queue)
    assert len(batches[0]) >= 200
    assert max(sizes(batches)) <= 2 * MIB
    assert sum(map(len, batches)) == 220


def test_large_leases_that_pass_together_are_taken_back_a_few_at_a_time(queue, clock):
    queue.schedule_many([NewJob(b"%d" % n, 0, id=f"s{n}") for n in range(100)])
    for n in range(6):
        queue.schedule(bytes(MIB), delay=0, id=f"l{n}")
    held = []
    while claims := queue.claim(1000):
        held += claims
    assert len(held) == 106
    clock.advance(31)
    seen = []
    while len(seen) < 106:
        claims = queue.claim(1000)
        assert claims, "work is left"
        assert sum(len(claim.payload) for claim in claims) <= 2 * MIB
        assert all(claim.requeues == 1 for claim in claims)
        seen += claims
        assert queue.ack(claims) == len(claims)
    assert {claim.id for claim in seen} == {claim.id for claim in held}


def test_a_direct_release_is_bounded_as_well(queue, redis_client, broker):
    for _ in range(5):
        queue.schedule(bytes(MIB), delay=0, release=push(broker + "q"))
    for left in (4, 3, 2, 1, 0):
        assert turn(queue, redis_client).direct == 1
        assert queue.stats().waiting == left
    assert redis_client.llen(broker + "q") == 5


def test_a_page_ends_early_when_its_jobs_are_large(queue):
    for n in range(5):
        queue.schedule(bytes(MIB), delay=n, id=f"{n}")
    seen, cursor = [], None
    while True:
        page = queue.jobs(cursor=cursor)
        assert len(page.jobs) <= 2
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == ["0", "1", "2", "3", "4"]


def test_a_repeated_claim_is_no_larger_than_the_first(queue, redis_client):
    for _ in range(3):
        queue.schedule(bytes(MIB), delay=0)
    call = commands.claim(keys_of(queue), Asker.new(), 1, lease=10**7, limit=100, now=queue._clock())
    first = send(redis_client, call)
    second = send(redis_client, call)
    assert len(first.claims) == len(second.claims) == 1
    assert dataclasses.astuple(first.claims[0]) == dataclasses.astuple(second.claims[0])


# ----------------------------------------------------------------------------------------------- against a plain model


@pytest.mark.parametrize("seed", range(25))
def test_any_mixture_does_what_its_commands_say_one_by_one(queue, clock, redis_client, broker, seed):
    """Runs are merged, and what neighbours share is read once; neither may show."""
    pick = random.Random(seed)
    expected = {}
    jobs = []
    stop = broker + "stop"
    redis_client.set(stop, "")
    for n in range(pick.randint(1, 120)):
        payload = pick.choice([b"%d" % n, b"", b"\x00\xff%d" % n, b"same"])
        due = clock() + 1_000_000 + n
        release, ended = [], False
        for _ in range(pick.choice([1, 1, 1, 1, 2, 3])):
            key, verb = broker + pick.choice("ab"), pick.choice(["LPUSH", "RPUSH", "RPUSH"])
            values = {
                b"literal": "literal",
                payload: Payload.BYTES,
                b"%d" % (due // 1000): Payload.DUE_MS,
                b"<" + payload + b">": ["<", Payload.BYTES, ">"],
                b"id-%d" % n: Payload.ID,
            }
            value = pick.choice([payload, payload, payload, *values])
            if pick.random() < 0.1:
                there = pick.random() < 0.5
                release.append((Payload.UNLESS_EXISTS, stop if there else broker + "nothing"))
                ended = ended or there
            release.append((verb, key, values[value]))
            if not ended:
                before = expected.setdefault(key, [])
                before.insert(0 if verb == "LPUSH" else len(before), value)
        meta = pick.choice([None, None, {"task": "a"}, {"task": "b"}, {"task": "a", "n": str(n)}])
        jobs.append(NewJob(payload, timedelta(microseconds=1_000_000 + n), id=f"id-{n}", meta=meta, release=release))
    queue.schedule_many(jobs)
    clock.advance(2)
    released = 0
    while released < len(jobs):
        got = turn(queue, redis_client, limit=pick.choice([1, 7, 50, 1000]))
        assert got.notes == ()
        assert got.direct > 0
        released += got.direct
    for key in (broker + "a", broker + "b"):
        assert content(redis_client, key) == expected.get(key)
    assert (queue.stats().waiting, queue.stats().leased, queue.stats().dead) == (0, 0, 0)


def test_a_retry_among_fresh_ones_with_the_same_command(queue, clock, redis_client, broker):
    key = broker + "q"
    redis_client.set(key, "in the way")
    queue.schedule_many([NewJob(b"%d" % n, n, id=f"j{n}", release=push(key, verb="RPUSH")) for n in range(3)])
    for _ in range(2):
        turn(queue, redis_client, retry_base=500_000)
        clock.advance(1)
    redis_client.delete(key)
    clock.advance(10)
    queue.schedule_many([NewJob(b"%d" % n, 0, id=f"j{n}", release=push(key, verb="RPUSH")) for n in range(3, 6)])
    assert turn(queue, redis_client).direct == 6
    assert sorted(content(redis_client, key)) == [b"%d" % n for n in range(6)]
