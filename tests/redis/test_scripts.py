"""The Lua scripts: loaded, bound by name, sent by SHA1, small, and the same when they are sent twice."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources

import pytest

from delayadapters import NewJob, Outcome, State
from delayadapters.redis import aio, commands, scripts, steering, sync
from delayadapters.redis.commands import Asker, Verdict
from delayadapters.redis.keys import ShardKeys
from delaytests.raw import content, keys_of, send, snapshot

FOLDER = resources.files("delayadapters.redis") / "lua"
NAMES = sorted(path.name.removesuffix(".lua") for path in FOLDER.iterdir() if path.name.endswith(".lua"))
INCLUDES = sorted(path.name for path in (FOLDER / "include").iterdir())
KEYS = ShardKeys.of("n", 0)

# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_what_it_takes_and_returns(name):
    text = (FOLDER / f"{name}.lua").read_text()
    head = text[: re.search(r"^[^-]", text, re.MULTILINE).start()]
    assert re.match(r"-- [A-Z][^\n]*\.\n", head), "begins with a sentence"
    assert re.search(r"^-- keys: \w", head, re.MULTILINE)
    assert re.search(r"^-- args:( \w|$)", head, re.MULTILINE)
    assert "Returns" in head
    assert text.count("\n-- include:") <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_script_file_is_small(name):
    assert len((FOLDER / f"{name}.lua").read_text().splitlines()) <= 200


def test_every_include_is_used_and_small():
    used = {
        word
        for n in NAMES
        for line in re.findall(r"-- include:(.*)", (FOLDER / f"{n}.lua").read_text())
        for word in line.split()
    }
    assert {f"{word}.lua" for word in used} == set(INCLUDES)
    for name in INCLUDES:
        assert len((FOLDER / "include" / name).read_text().splitlines()) <= 110, name


@pytest.mark.parametrize("name", NAMES)
def test_the_head_and_the_body_agree(name):
    script = scripts.load(name)
    body = script.text.decode()
    fields = {field.name for field in dataclasses.fields(ShardKeys)}
    assert set(script.key_names) <= fields - {"wake"}, "keys are ones of keys.py; the channel is an argument"
    assert len(set(script.key_names) | set(script.arg_names)) == len(script.key_names) + len(script.arg_names)
    for word in (*script.key_names, *script.arg_names):
        assert len(re.findall(rf"\b{word}\b", body)) > 1, f"{word} is declared and not used"
    # Every key and argument comes from the head.
    assert len(re.findall(r"KEYS\[\d+\]", body)) == len(script.key_names) + ("acl_check_cmd(name, KEYS[1])" in body)
    assert len(re.findall(r"ARGV\[\d+\]", body)) == len(script.arg_names)


@pytest.mark.parametrize("name", NAMES)
def test_no_key_is_built_in_lua(name):
    body = scripts.load(name).text.decode()
    assert not re.search(r"redis\.p?call\('[A-Z]+', *['\"]", body), "a key as a literal"


@pytest.mark.parametrize("name", NAMES)
def test_binding_wants_exactly_the_names_of_the_head(name):
    script = scripts.load(name)
    args = dict.fromkeys(script.arg_names, b"")
    keys, argv = script.bind(KEYS, **args)
    assert keys == [getattr(KEYS, key) for key in script.key_names]
    assert len(argv) == len(script.arg_names)
    with pytest.raises(TypeError, match=name):
        script.bind(KEYS, **args, nonsense=1)
    if args:
        first = script.arg_names[0]
        with pytest.raises(TypeError, match=first):
            script.bind(KEYS, **{key: value for key, value in args.items() if key != first})


def test_arguments_become_bytes_without_loss():
    script = scripts.load("get")
    assert script.bind(KEYS, id="ä\0")[1] == ["ä\0".encode()]
    assert script.bind(KEYS, id=b"\xff\0")[1] == [b"\xff\0"]
    assert script.bind(KEYS, id=2**63)[1] == [b"9223372036854775808"]


def test_a_script_is_read_once():
    assert scripts.load("claim") is scripts.load("claim")


# ----------------------------------------------------------------------------------------------------------- NOSCRIPT


def test_a_server_that_forgot_the_scripts_is_sent_them_again(redis_server, queue):
    with redis_server.client() as client:
        for _ in range(2):
            client.script_flush()
            job = queue.schedule(b"x", delay=60)
            client.script_flush()
            assert queue.get(job.id) == dataclasses.replace(job, outcome=None)
            client.script_flush()
            assert queue.cancel(job.id) is Outcome.CANCELLED


async def test_a_server_that_forgot_the_scripts_is_sent_them_again_by_asyncio(redis_client, async_queue):
    for _ in range(2):
        redis_client.script_flush()
        job = await async_queue.schedule(b"x", delay=60)
        redis_client.script_flush()
        assert await async_queue.cancel(job.id) is Outcome.CANCELLED


def test_a_script_is_sent_as_text_once(redis_client, queue):
    queue.schedule(b"x", delay=60)
    redis_client.config_resetstat()
    for _ in range(5):
        queue.schedule(b"x", delay=60)
    stats = redis_client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 5
    assert "cmdstat_eval" not in stats


def test_the_sha_is_redis_own(redis_client):
    for name in NAMES:
        script = scripts.load(name)
        assert redis_client.script_load(script.text).encode() == script.sha


# -------------------------------------------------------------------------------------------------- twice is as once


class Bench:
    """A shard on a clock that stands still, and requests of all kinds that are sent twice."""

    def __init__(self, queue, client, clock):
        self.queue, self.client, self.clock = queue, client, clock
        self.keys = keys_of(queue)
        self.asker = Asker.new("test")
        self.calls = 0

    def state(self):
        return snapshot(self.client, "{*") | {b"broker": content(self.client, "broker")}

    def twice(self, call, ignore=()):
        """Sends the very same call twice: the same answer, and nothing has changed by the second."""
        first = call.parse(sync.execute(self.client, call))
        before = self.state()
        second = call.parse(sync.execute(self.client, call))
        assert self.state() == before
        if isinstance(first, commands.Claimed):
            kept = {f: getattr(first, f) for f in ignore}
            second = dataclasses.replace(second, **kept)
        assert second == first
        return first

    def stored(self, *jobs):
        return [self.queue._verbs.new_job(job, self.clock()) for job in jobs]

    def schedule(self, *jobs, mode="error"):
        return commands.schedule(self.keys, self.stored(*jobs), mode, self.clock())

    def claim(self, **options):
        self.calls += 1
        options = {"lease": 30_000_000, "limit": 100, "now": self.clock()} | options
        return commands.claim(self.keys, self.asker, self.calls, **options)


@pytest.fixture
def bench(make_queue, redis_client, clock):
    yield Bench(make_queue(clock=clock), redis_client, clock)
    redis_client.delete("broker", "count")


@pytest.mark.parametrize("mode", ["error", "keep", "replace", "add"])
@pytest.mark.parametrize("before", ["nothing", "waiting", "leased", "dead"])
def test_schedule_twice(bench, mode, before):
    if before != "nothing":
        bench.queue.schedule(b"old", delay=0, id="a")
    if before in ("leased", "dead"):
        claims = bench.queue.claim()
        if before == "dead":
            bench.queue.fail(claims, "why", retry_in=None)
    call = bench.schedule(NewJob(b"1", delay=5, id="a"), NewJob(b"2", delay=1, id="b"), mode=mode)
    bench.twice(call)
    if mode == "add":
        assert bench.queue.stats().waiting == 2 + (before == "waiting")


@pytest.mark.parametrize("mode", ["keep", "replace", "add"])
def test_schedule_twice_with_ids_that_repeat_in_the_call(bench, mode):
    jobs = [NewJob(b"%d" % n, delay=9 - n, id=f"id{n % 3}") for n in range(9)]
    first = bench.twice(bench.schedule(*jobs, mode=mode))
    assert len(first) == 9
    assert bench.queue.stats().waiting == (9 if mode == "add" else 3)


@pytest.mark.parametrize("end", ["cancelled", "released", "dead", "rescheduled", "replaced"])
@pytest.mark.parametrize("mode", ["error", "keep", "replace", "add"])
def test_a_repeated_schedule_brings_nothing_back(bench, mode, end):
    call = bench.schedule(NewJob(b"x", delay=1, id="a"), mode=mode)
    first = send(bench.client, call)
    if end == "cancelled":
        assert bench.queue.cancel("a") is Outcome.CANCELLED
    elif end == "rescheduled":
        bench.queue.reschedule("a", delay=99)
    elif end == "replaced":
        bench.queue.schedule(b"y", delay=3, id="a", if_exists="replace")
    else:
        bench.clock.advance(1)
        claims = bench.queue.claim()
        bench.queue.ack(claims) if end == "released" else bench.queue.fail(claims, "", retry_in=None)
    before = bench.state()
    assert send(bench.client, call) == first
    assert bench.state() == before


@pytest.mark.parametrize("leased_too", [False, True])
def test_cancel_twice(bench, leased_too):
    for n in range(3):
        bench.queue.schedule(b"%d" % n, delay=n, id="a", if_exists="add")
    if leased_too:
        bench.queue.claim(1)
    outcome = bench.twice(commands.cancel(bench.keys, b"a", bench.clock()))
    assert outcome is (Outcome.IN_FLIGHT if leased_too else Outcome.CANCELLED)
    assert bench.queue.stats().waiting == 0


def test_a_repeated_cancel_does_not_cancel_what_came_after_it(bench):
    bench.queue.schedule(b"x", delay=1, id="a")
    call = commands.cancel(bench.keys, b"a", bench.clock())
    assert send(bench.client, call) is Outcome.CANCELLED
    bench.queue.schedule(b"y", delay=1, id="a")
    assert send(bench.client, call) is Outcome.CANCELLED
    assert bench.queue.get("a").payload == b"y"


@pytest.mark.parametrize("when", [0, -5_000_000, "absolute"])
def test_reschedule_and_release_now_twice(bench, when):
    bench.queue.schedule(b"x", delay=60, id="a")
    micros = bench.clock() + 1 if when == "absolute" else when
    call = commands.reschedule(bench.keys, b"a", micros, bench.clock())
    assert bench.twice(call) is Outcome.RESCHEDULED
    # And after the clock went on: the delay is not added again.
    late = dataclasses.replace(call, args=[b"%d" % (bench.clock() + 10**7), *call.args[1:]])
    before = bench.state()
    assert send(bench.client, late) is Outcome.RESCHEDULED
    assert bench.state() == before


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_replay_and_discard_twice(bench, verb):
    for n in range(3):
        bench.queue.schedule(b"%d" % n, delay=0, id="a", if_exists="add")
    bench.queue.fail(bench.queue.claim(), "why", retry_in=None)
    outcome = bench.twice(commands.revive(bench.keys, b"a", verb, bench.clock()))
    assert outcome is (Outcome.REPLAYED if verb == "replay" else Outcome.DISCARDED)
    assert (bench.queue.stats().waiting, bench.queue.stats().dead) == (3 if verb == "replay" else 0, 0)


def test_a_repeated_replay_does_not_bring_back_a_released_job(bench):
    bench.queue.schedule(b"x", delay=0, id="a")
    bench.queue.fail(bench.queue.claim(), "why", retry_in=None)
    call = commands.revive(bench.keys, b"a", "replay", bench.clock())
    assert send(bench.client, call) is Outcome.REPLAYED
    bench.queue.ack(bench.queue.claim())
    assert send(bench.client, call) is Outcome.REPLAYED
    assert bench.queue.get("a") is None


@pytest.mark.parametrize("verb", ["ack", "back", "retry", "dead"])
def test_settle_twice(bench, verb):
    for n in range(3):
        bench.queue.schedule(b"%d" % n, delay=0, id=f"a{n}")
    claims = bench.queue.claim()
    verdicts = [Verdict(claim.entry, verb, 7, "why") for claim in claims]
    assert bench.twice(commands.settle(bench.keys, claims[0].lease, verdicts, bench.clock())) == 3


def test_a_repeated_settle_leaves_the_next_claim_alone(bench):
    bench.queue.schedule(b"x", delay=0, id="a")
    claims = bench.queue.claim()
    call = commands.settle(bench.keys, claims[0].lease, [Verdict(claims[0].entry, "back")], bench.clock())
    assert send(bench.client, call) == 1
    (again,) = bench.queue.claim()
    assert again.lease == claims[0].lease, "the clock stands still: the fence alone would not tell"
    before = bench.state()
    assert send(bench.client, call) == 1
    assert bench.state() == before


def test_renew_twice(bench):
    for n in range(3):
        bench.queue.schedule(b"%d" % n, delay=0, id=f"a{n}")
    got = send(bench.client, bench.claim())
    entries = [claim.entry for claim in got.claims]
    bench.clock.advance(10)
    bench.calls += 1
    call = commands.renew(
        bench.keys, bench.asker, bench.calls, lease=30_000_000, fence=got.lease, entries=entries, now=bench.clock()
    )
    deadline, held = bench.twice(call)
    assert deadline == bench.clock() + 30_000_000
    assert held == set(entries)


def test_leave_twice(bench):
    bench.queue.schedule(b"x", delay=9)
    assert send(bench.client, bench.claim(watch_ms=60_000)).watching
    call = commands.leave(bench.keys, bench.asker)
    assert send(bench.client, call) is True
    before = bench.state()
    assert send(bench.client, call) is False
    assert bench.state() == before
    assert content(bench.client, bench.keys.watch) is None


def test_a_claim_that_comes_after_its_loop_has_left_does_nothing(bench):
    """A slow network delivers it when nobody is there any more: it must not lease to nobody."""
    bench.queue.schedule(b"x", delay=0)
    early = bench.claim(watch_ms=60_000)
    late = bench.claim(watch_ms=60_000)
    got = send(bench.client, late)
    send(bench.client, bench.claim(limit=0, fence=got.lease, acks=[claim.entry for claim in got.claims]))
    send(bench.client, commands.leave(bench.keys, bench.asker))
    bench.queue.schedule(b"y", delay=0)
    before = bench.state()
    for call in (early, late, bench.claim(watch_ms=60_000)):
        assert send(bench.client, call).claims == []
    assert bench.state() == before
    assert [claim.payload for claim in bench.queue.claim()] == [b"y"]


def test_claim_twice_answers_its_batch_again(bench):
    for n in range(10):
        bench.queue.schedule(b"%d" % n, delay=0)
    bench.queue.schedule(b"later", delay=60)
    first = bench.twice(bench.claim(limit=4, watch_ms=60_000))
    assert [claim.payload for claim in first.claims] == [b"0", b"1", b"2", b"3"]
    assert first.watching
    # With acks of that batch, and another one to claim.
    acks = [claim.entry for claim in first.claims]
    second = bench.twice(bench.claim(limit=4, fence=first.lease, acks=acks))
    assert [claim.payload for claim in second.claims] == [b"4", b"5", b"6", b"7"]
    assert second.acked == 4
    # Acks alone.
    third = bench.twice(bench.claim(limit=0, fence=second.lease, acks=[claim.entry for claim in second.claims]))
    assert third.acked == 4
    assert bench.queue.stats().leased == 0
    assert bench.queue.stats().waiting == 3


@pytest.mark.parametrize(("seconds", "renewed"), [(14.9, False), (15.1, True)])
def test_a_claim_repeated_late_in_its_lease_gets_a_new_one(bench, seconds, renewed):
    """Before that the fence stays: the first answer may have arrived, and this be a copy that came late."""
    bench.queue.schedule(b"x", delay=0)
    call = bench.claim()
    first = send(bench.client, call)
    bench.clock.advance(seconds)
    late = dataclasses.replace(call, args=[b"%d" % bench.clock(), *call.args[1:]])
    second = send(bench.client, late)
    assert [claim.entry for claim in second.claims] == [claim.entry for claim in first.claims]
    assert second.lease == (bench.clock() + 30_000_000 if renewed else first.lease)
    assert bench.queue.stats().leased == 1
    assert bench.queue.ack(second.claims) == 1


def test_a_request_that_comes_after_a_later_one_of_its_loop_does_nothing(bench):
    """What a partition held back reaches Redis when nobody waits for the answer any more."""
    for n in range(4):
        bench.queue.schedule(b"%d" % n, delay=0)
    asker = Asker.new("loop")
    keys, now = keys_of(bench.queue), bench.clock()

    def ask(number, **more):
        return commands.claim(keys, asker, number, lease=30_000_000, limit=2, now=now, **more)

    first, second = send(bench.client, ask(1)), send(bench.client, ask(2))
    assert len(first.claims) == len(second.claims) == 2
    before = bench.state()
    assert send(bench.client, ask(1, fence=second.lease, acks=[c.entry for c in second.claims])).claims == []
    held = [one.entry for one in second.claims]
    old = commands.renew(keys, asker, 1, lease=60_000_000, fence=second.lease, entries=held, now=now)
    assert send(bench.client, old) == (second.lease, frozenset())
    assert bench.state() == before
    assert bench.queue.ack(second.claims) == 2


def test_a_claim_repeated_after_its_lease_passed_does_not_take_what_another_has(bench):
    for n in range(4):
        bench.queue.schedule(b"%d" % n, delay=0)
    call = bench.claim(limit=2)
    assert len(send(bench.client, call).claims) == 2
    bench.clock.advance(31)
    others = bench.queue.claim(3)
    assert [claim.payload for claim in others] == [b"0", b"1", b"2"]
    late = dataclasses.replace(call, args=[b"%d" % bench.clock(), *call.args[1:]])
    assert send(bench.client, late).claims == []
    assert bench.queue.ack(others) == 3


def test_a_repeated_claim_of_cancelled_and_acked_jobs_is_empty(bench):
    bench.queue.schedule(b"x", delay=0, id="a")
    call = bench.claim()
    got = send(bench.client, call)
    assert bench.queue.ack(got.claims) == 1
    assert send(bench.client, call).claims == []
    assert bench.queue.get("a") is None


def test_a_repeated_claim_releases_directly_once(bench):
    for n in range(5):
        bench.queue.schedule(b"%d" % n, delay=0, release=[("RPUSH", "broker", b"%d" % n), ("INCR", "count")])
    bench.queue.schedule(b"leased", delay=0)
    first = bench.twice(bench.claim(), ignore=("direct", "late"))
    assert first.direct == 5
    assert [claim.payload for claim in first.claims] == [b"leased"]
    assert content(bench.client, "broker") == [b"0", b"1", b"2", b"3", b"4"]
    assert content(bench.client, "count") == b"5"


def test_get_page_stats_change_nothing(bench):
    bench.queue.schedule(b"x", delay=0, id="a")
    bench.queue.schedule(b"y", delay=9, id="b")
    for call in (
        commands.get(bench.keys, b"a"),
        commands.page(bench.keys, "due", 1, None, None),
        commands.page(bench.keys, "dead", 1, None, None),
        commands.stats(bench.keys, bench.clock()),
    ):
        before = bench.state()
        bench.twice(call)
        assert bench.state() == before


async def test_asyncio_sends_the_same_bytes(make_async_queue, redis_client, redis_server, clock):
    """Both executors send one request: repeated by the other one, it is the same call."""
    queue = make_async_queue(clock=clock)
    call = commands.schedule(keys_of(queue), [queue._verbs.new_job(NewJob(b"x", 1, id="a"), clock())], "error", clock())
    first = call.parse(await aio.execute(queue.client, call))
    before = snapshot(redis_client)
    assert send(redis_client, call) == first
    assert snapshot(redis_client) == before


# -------------------------------------------------------------------------------------------------- many in one call


@pytest.mark.parametrize("verb", ["cancel", "reschedule", "replay", "discard"])
@pytest.mark.parametrize("by", ["id", "entry"])
def test_steer_twice(bench, verb, by):
    queue = bench.queue
    for id in "abc":
        queue.schedule(b"x", delay=0 if verb in ("replay", "discard") else 60, id=id)
    if verb in ("replay", "discard"):
        queue.fail(queue.claim(), "why", retry_in=None)
    rows, _ = queue._run(queue._verbs.rows("dead" if verb in ("replay", "discard") else "due", 10, None, None))
    items = [b"a", b"b"] if by == "id" else [row.place.entry for row in rows if row.id in "ab"]
    call = steering._steer(bench.keys, verb, by, items, 0, True, bench.clock())
    done = steering._DONE[verb]
    assert bench.twice(call) == [done, done]
    assert queue.counters().cancelled == (2 if verb == "cancel" else 0)


def test_a_repeated_steer_does_not_cancel_what_came_after_it(bench):
    bench.queue.schedule(b"x", delay=60, id="a")
    call = steering._steer(bench.keys, "cancel", "id", [b"a"], 0, True, bench.clock())
    assert bench.twice(call) == [Outcome.CANCELLED]
    bench.queue.schedule(b"again", delay=60, id="a")
    assert bench.twice(call) == [Outcome.CANCELLED]
    assert bench.queue.get("a").payload == b"again"


def test_restore_twice(bench):
    job = steering.Incoming(b"a", b"token", State.WAITING, bench.clock() + 5, bench.clock() + 5, 16, b"x")
    other = steering.Incoming(b"a", b"other", State.DEAD, bench.clock(), bench.clock() - 5, 16, b"y")
    call = steering._restore(bench.keys, [job, other, job], bench.clock())
    assert bench.twice(call) == 2
    stats = bench.queue.stats()
    assert (stats.waiting, stats.dead) == (1, 1)
    assert bench.twice(steering._restore(bench.keys, [job], bench.clock())) == 0
