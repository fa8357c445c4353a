"""The rights of docs/reference/acl.md: enough for everything, and none of them for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delayadapters import (
    AsyncDelayQueue,
    AsyncReleaser,
    DelayQueue,
    NewJob,
    Outcome,
    PermissionDenied,
    Releaser,
    State,
)
from delayadapters.redis import commands
from delayadapters.redis.commands import Asker
from delaytests import RedisServer, wait_until, wait_until_async
from delaytests.raw import keys_of, snapshot

DOC = Path(__file__).parents[2] / "docs" / "reference" / "acl.md"
LINES = re.findall(r"^ACL SETUSER .*$", DOC.read_text("utf-8"), re.MULTILINE)
PASSWORD = "choose-a-password"
NAME = "delayadapters"
LOSES_WAKES = {"publish", "subscribe", "unsubscribe"}
"""Without these everything works, a little later."""


def rights(user: str) -> list[str]:
    (line,) = [line for line in LINES if line.split()[2] == user and " reset " in line]
    return line.split()[3:]


def commands_of(user: str) -> list[str]:
    return sorted(right[1:] for right in rights(user) if right.startswith("+"))


@pytest.fixture(scope="module")
def server(redis_server):
    with RedisServer(redis_server.label) as started:
        yield started


@pytest.fixture
def admin(server):
    with server.client() as client:
        client.flushall()
        client.script_flush()
        yield client
        client.execute_command("ACL", "DELUSER", "delay-producer", "delay-releaser", "delay-both")
        client.flushall()


def url_of(server, user: str) -> str:
    return f"redis://{user}:{PASSWORD}@{server.host}:{server.port}/0"


@pytest.fixture
def open_queue(server, admin):
    made = []

    def make(user: str, *, without: str | None = None, also: tuple[str, ...] = ()) -> DelayQueue:
        words = rights(user)
        if without is not None:
            assert without in words
            words.remove(without)
        admin.execute_command("ACL", "SETUSER", user, *words, *also)
        queue = DelayQueue.from_url(url_of(server, user), timeout=5)
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.close()


def dead_job(boss: DelayQueue, id: str) -> None:
    boss.schedule(b"x", delay=0, id=id)
    assert boss.fail(boss.claim(), "why", retry_in=None) == 1


# Every verb of a producer: what must be there, and the call.
PRODUCER = {
    "schedule": (None, lambda q: q.schedule(b"x", delay=5)),
    "schedule, replace": ("waiting", lambda q: q.schedule(b"x", delay=5, id="a", if_exists="replace")),
    "schedule, replace a further": ("twice", lambda q: q.schedule(b"x", delay=5, id="a", if_exists="replace")),
    "schedule, add": ("waiting", lambda q: q.schedule(b"x", delay=5, id="a", if_exists="add")),
    "schedule_many": (None, lambda q: q.schedule_many([NewJob(b"x", 5), NewJob(b"y", 5)])),
    "cancel": ("waiting", lambda q: q.cancel("a")),
    "cancel, released before": ("released", lambda q: q.cancel("a")),
    "cancel, released with many before": ("many released", lambda q: q.cancel("a0")),
    "reschedule": ("waiting", lambda q: q.reschedule("a", delay=7)),
    "release_now": ("waiting", lambda q: q.release_now("a")),
    "cancel_many": ("waiting", lambda q: q.cancel_many(["a", "b"])),
    "reschedule_many": ("waiting", lambda q: q.reschedule_many(["a", "b"], delay=7)),
    "replay": ("dead", lambda q: q.replay("a")),
    "discard": ("dead", lambda q: q.discard("a")),
    "get": ("waiting", lambda q: q.get("a")),
    "jobs": ("waiting", lambda q: q.jobs()),
    "dead_jobs": ("dead", lambda q: q.dead_jobs()),
    "stats": (None, lambda q: q.stats()),
    "counters": ("waiting", lambda q: q.counters()),
    "loops": ("due", lambda q: q.loops()),
    "purge": ("waiting", lambda q: q.purge()),
}


def looks(queue: DelayQueue) -> None:
    """What an idle release loop asks, and one that ends."""

    def steps():
        keys, asker = keys_of(queue), Asker.new()
        yield commands.claim(keys, asker, 1, lease=10**6, limit=0, watch_ms=1000)
        yield commands.peek(keys, asker, watch_ms=1000, thorough=True, beat=1)
        yield commands.probe(keys, asker, beat=1, timed=True)
        yield commands.leave(keys, asker)

    queue._run(steps())


RELEASER = {
    "looking": (None, looks),
    "claim": ("due", lambda q: q.claim()),
    "claim, a lease passed": ("lapsed", lambda q: q.claim()),
    "claim, direct": ("direct", lambda q: q.claim()),
    "claim, many direct": ("many direct", lambda q: q.claim()),
    "ack": ("leased", lambda q: q.ack(q.held)),
    "give_back": ("leased", lambda q: q.give_back(q.held)),
    "fail": ("leased", lambda q: q.fail(q.held, "why", retry_in=1)),
    "fail, dead": ("leased", lambda q: q.fail(q.held, "why", retry_in=None)),
    "renew": ("leased", lambda q: q.renew(q.held)),
}


def prepare(boss: DelayQueue, what: str | None) -> list:
    """The state a verb needs; answers claims that are held."""
    boss.purge()
    if what == "waiting":
        boss.schedule(b"old", delay=9, id="a")
    elif what == "twice":
        for _ in range(2):
            boss.schedule(b"old", delay=9, id="a", if_exists="add")
    elif what == "dead":
        dead_job(boss, "a")
    elif what == "released":
        boss.schedule(b"old", delay=0, id="a")
        boss.ack(boss.claim())
        boss.schedule(b"new", delay=9, id="a")
    elif what == "due":
        boss.schedule_many([NewJob(b"x", 0, id="a"), NewJob(b"x", 0, id="a")], if_exists="add")
    elif what == "direct":
        boss.schedule(b"x", delay=0, id="a", release=[("LPUSH", "{delayadapters:0}:broker", "x")])
    elif what == "lapsed":
        boss.schedule(b"x", delay=0, id="a")
        boss.claim(lease=0.001)
        wait_until(lambda: boss.stats().leased == 1)
    elif what in ("many direct", "many released"):
        release = [("LPUSH", "{delayadapters:0}:broker", "x")]
        boss.schedule_many([NewJob(b"x", 0, id=f"a{n}", release=release) for n in range(30)])
        if what == "many released":
            boss.claim()
            boss.schedule(b"new", delay=9, id="a0")
    elif what == "leased":
        boss.schedule(b"x", delay=0, id="a")
        return boss.claim()
    return []


@pytest.fixture
def boss(server, admin):
    with DelayQueue.from_url(server.url) as queue:
        yield queue


# -------------------------------------------------------------------------------------------------------- it is enough


def test_the_lines_of_the_page_run_as_they_stand(server, admin):
    assert len(LINES) == 5
    for line in LINES:
        assert admin.execute_command(*line.split()) in (b"OK", True)
    for user in ("delay-producer", "delay-releaser", "delay-both"):
        with DelayQueue.from_url(url_of(server, user)) as queue:
            assert queue.name == NAME
            with pytest.raises(PermissionDenied):
                DelayQueue(queue.client, name="other").claim()


@pytest.mark.parametrize("user", ["delay-producer", "delay-both"])
def test_a_producer_may_do_its_verbs(open_queue, boss, user):
    queue = open_queue(user)
    for name, (what, call) in PRODUCER.items():
        prepare(boss, what)
        try:
            call(queue)
        except PermissionDenied as error:
            pytest.fail(f"{name}: {error}")


@pytest.mark.parametrize("user", ["delay-releaser", "delay-both"])
def test_a_releaser_may_do_its_verbs(open_queue, boss, user):
    queue = open_queue(user, also=("+lpush",))
    for name, (what, call) in RELEASER.items():
        queue.held = prepare(boss, what)
        try:
            call(queue)
        except PermissionDenied as error:
            pytest.fail(f"{name}: {error}")


def test_a_producer_may_not_claim(open_queue, boss):
    queue = open_queue("delay-producer")
    boss.schedule(b"x", delay=0)
    with pytest.raises(PermissionDenied):
        queue.claim()
    assert boss.stats().due == 1


@pytest.mark.parametrize("user", ["delay-producer", "delay-releaser", "delay-both"])
def test_another_queue_is_out_of_reach(open_queue, server, user):
    open_queue(user)
    for name in ("other", "delayadapters2", "x{delayadapters".replace("{", "")):
        with DelayQueue.from_url(url_of(server, user), name=name) as queue, pytest.raises(PermissionDenied):
            queue.get("a") if user != "delay-releaser" else queue.claim()


class Collect:
    def __init__(self):
        self.payloads = []

    def publish(self, claims):
        self.payloads += [claim.payload for claim in claims]


class AsyncCollect(Collect):
    async def publish(self, claims):
        Collect.publish(self, claims)


def test_a_releaser_works_with_these_rights(open_queue, boss):
    producer, queue = open_queue("delay-producer"), open_queue("delay-releaser", also=("~broker", "+lpush"))
    publisher = Collect()
    dead_job(boss, "dead")
    with Releaser(queue, publisher, lease=5) as releaser:
        producer.schedule(b"1", delay=0)
        producer.schedule(b"2", delay=0.2)
        producer.schedule(b"3", delay=0, release=[("LPUSH", "broker", "3")])
        producer.replay("dead")
        wait_until(lambda: len(publisher.payloads) == 3 and releaser.stats.direct == 1)
        # Long enough for a look of every kind: the watch renewed, the head, the clock and leases.
        wait_until(lambda: releaser.stats.peeks >= 2, timeout=15)
        assert releaser.stats.faults == 0
    assert boss.stats().waiting == boss.stats().leased == 0


async def test_an_async_releaser_works_with_these_rights(open_queue, boss, server):
    open_queue("delay-releaser")
    publisher = AsyncCollect()
    async with (
        AsyncDelayQueue.from_url(url_of(server, "delay-releaser")) as queue,
        AsyncReleaser(queue, publisher) as releaser,
        AsyncReleaser(queue, publisher) as second,
    ):
        boss.schedule(b"1", delay=0)
        await wait_until_async(lambda: publisher.payloads == [b"1"])
        await wait_until_async(lambda: releaser.stats.peeks + second.stats.peeks >= 3, timeout=15)
        assert releaser.stats.faults == second.stats.faults == 0


# ------------------------------------------------------------------------------------------------ and none is too many


@pytest.mark.parametrize(
    ("user", "verbs", "harmless"),
    [
        ("delay-producer", PRODUCER, {"publish", "type", "eval", "hincrby"}),
        ("delay-releaser", RELEASER, {"publish", "type", "eval", "hincrby", "subscribe", "unsubscribe"}),
    ],
)
def test_without_any_one_command_something_is_refused_and_nothing_half_done(
    open_queue, boss, admin, user, verbs, harmless, redis_server
):
    atomic = redis_server.version >= (7,)
    needless = []
    for name in commands_of(user):
        queue = open_queue(user, without=f"+{name}", also=("+lpush",))
        refused = []
        for verb, (what, call) in verbs.items():
            queue.held = prepare(boss, what)
            before = snapshot(admin)
            try:
                call(queue)
            except PermissionDenied as error:
                refused.append(verb)
                assert error.__cause__ is not None
                assert name.lower() in str(error).lower() or not atomic, f"{name}: {error}"
                if (atomic and verb != "looking") or (verb == "schedule" and name in ("zadd", "hset")):
                    after = snapshot(admin)
                    after.pop(keys_of(queue).seq if not atomic else None, None)  # a number more or less is no matter
                    assert after == before, f"{verb} without {name}"
        if not refused and name not in harmless:
            needless.append(name)
        if name in harmless - {"type", "eval"}:
            assert refused == [], name
        queue.close()
    # Redis 6.2 does not ask beforehand: some are needed after minutes only.
    if atomic:
        assert needless == []
    else:
        rare = {"rename", "unlink", "hlen", "hgetall", "set", "sadd", "srem", "sismember", "zcount", "scard"}
        assert set(needless) <= rare


def test_without_eval_a_forgotten_script_is_refused(open_queue, boss, admin):
    queue = open_queue("delay-producer", without="+eval")
    boss.schedule(b"x", delay=5)
    assert queue.schedule(b"x", delay=5).outcome is Outcome.SCHEDULED
    admin.script_flush()
    with pytest.raises(PermissionDenied, match="eval"):
        queue.schedule(b"x", delay=5)


@pytest.mark.parametrize("user", ["delay-producer", "delay-releaser"])
def test_without_the_keys_everything_is_refused(open_queue, boss, admin, user):
    queue = open_queue(user, without=f"~{{{NAME}:*}}:*", also=("~other",))
    for verb, (what, call) in (PRODUCER if user == "delay-producer" else RELEASER).items():
        queue.held = prepare(boss, what)
        before = snapshot(admin)
        with pytest.raises(PermissionDenied):
            call(queue)
        assert snapshot(admin) == before, verb


@pytest.mark.parametrize("missing", [f"&{{{NAME}:*}}:wake", "+publish"])
def test_without_the_channel_wakes_are_lost_and_nothing_else(open_queue, boss, missing):
    queue = open_queue("delay-producer", without=missing)
    for what, call in PRODUCER.values():
        prepare(boss, what)
        call(queue)
    boss.purge()
    publisher = Collect()
    with Releaser(boss, publisher):
        wait_until(lambda: boss.client.exists(keys_of(boss).watch))
        queue.schedule(b"x", delay=0)
        wait_until(lambda: publisher.payloads == [b"x"], timeout=5)


@pytest.mark.parametrize("missing", [f"&{{{NAME}:*}}:wake", "+subscribe", "+unsubscribe", "+publish"])
def test_a_releaser_without_the_channel_polls(open_queue, boss, missing):
    queue = open_queue("delay-releaser", without=missing)
    publisher = Collect()
    with Releaser(queue, publisher) as releaser:
        wait_until(lambda: releaser.stats.claims > 0)
        boss.schedule(b"x", delay=0)
        wait_until(lambda: publisher.payloads == [b"x"], timeout=5)
        assert releaser.running
    assert boss.stats().leased == 0


def test_a_releaser_that_lacks_a_right_goes_on_when_it_is_given(open_queue, boss, admin, redis_server):
    if redis_server.version < (7,):
        pytest.skip("Redis 6.2 cannot be asked for rights: see the page")
    queue = open_queue("delay-releaser", without="+hset")
    publisher = Collect()
    boss.schedule(b"x", delay=0)
    with Releaser(queue, publisher, lease=1) as releaser:
        wait_until(lambda: releaser.stats.faults >= 2)
        admin.execute_command("ACL", "SETUSER", "delay-releaser", "+hset")
        wait_until(lambda: publisher.payloads == [b"x"])
    assert boss.stats().waiting == boss.stats().leased == 0


def test_rights_may_be_tied_to_keys(open_queue, boss, admin, redis_server):
    """Redis 7's selectors: what a script may do is asked for its own keys."""
    if redis_server.version < (7,):
        pytest.skip("selectors came with Redis 7")
    words = rights("delay-producer")
    plain = [w for w in words if not w.startswith(("+", "~", "-@"))]
    tied = " ".join([w for w in words if w.startswith(("+", "~", "-@"))])
    admin.execute_command("ACL", "SETUSER", "delay-producer", *plain, f"({tied})", "+publish", "+time", "~other:*")
    with DelayQueue.from_url(f"redis://delay-producer:{PASSWORD}@{boss_address(admin)}/0") as queue:
        assert queue.schedule(b"x", delay=5, id="a").outcome is Outcome.SCHEDULED
        assert queue.cancel("a") is Outcome.CANCELLED


def boss_address(client) -> str:
    options = client.connection_pool.connection_kwargs
    return f"{options['host']}:{options['port']}"


def test_a_direct_release_without_the_brokers_command_waits(open_queue, boss):
    queue = open_queue("delay-releaser")
    boss.schedule(b"x", delay=0, id="a", release=[("LPUSH", "{delayadapters:0}:broker", "x")])
    assert queue.claim() == []
    job = boss.get("a")
    assert (job.state, job.attempts) == (State.WAITING, 1)
    assert "lpush" in job.reason.lower() or "can't run this command" in job.reason
