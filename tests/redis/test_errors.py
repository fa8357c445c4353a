"""The tree of errors, from real servers in trouble: each says what to do, keeps its cause; nothing is half-written."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import socketserver
import threading
import time

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from delayadapters import (
    AsyncDelayQueue,
    DelayError,
    DelayQueue,
    JobExists,
    NewJob,
    Outcome,
    OutcomeUnknown,
    OutOfMemory,
    PayloadTooLarge,
    PermissionDenied,
    ReadOnlyReplica,
    RedisFault,
    RedisUnavailable,
    ScriptFailed,
    State,
    WrongKeyType,
)
from delaytests import wait_until, wait_until_async
from delaytests.queues import AsyncFace
from delaytests.raw import keys_of, snapshot
from delaytests.server import free_port

NAME = "errors"


@pytest.fixture(params=["sync", "async"])
async def open_queue(request):
    """``open_queue(url, **options)``: a queue with awaited verbs."""
    async with contextlib.AsyncExitStack() as stack:

        def make(url, **options):
            if request.param == "async":
                queue = AsyncDelayQueue.from_url(url, name=NAME, **options)
                stack.push_async_callback(queue.aclose)
                return queue
            queue = DelayQueue.from_url(url, name=NAME, **options)
            stack.callback(queue.close)
            return AsyncFace(queue)

        yield make


@contextlib.contextmanager
def raises(kind, *, within=None, match=None):
    """Exactly this class, with its cause, and within so many seconds."""
    began = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert type(caught.value) is kind, repr(caught.value)
    assert isinstance(caught.value, RedisFault)
    assert isinstance(caught.value.__cause__, (redis.exceptions.RedisError, OSError))
    assert within is None or time.monotonic() - began < within


# -------------------------------------------------------------------------------------------------------- unreachable


async def test_nobody_listens(open_queue):
    queue = open_queue(f"redis://127.0.0.1:{free_port()}/0", timeout=2)
    for verb in (queue.schedule(b"x", delay=1), queue.claim()):
        with raises(RedisUnavailable, within=3, match="check the URL"):
            await verb


async def test_no_such_host(open_queue):
    queue = open_queue("redis://no-such-host.invalid:6379/0", timeout=2)
    with raises(RedisUnavailable, within=10):
        await queue.schedule(b"x", delay=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # redis-py 5.0 forgets to close it
async def test_no_such_socket(open_queue, tmp_path):
    queue = open_queue(f"unix://{tmp_path}/none.sock", timeout=2)
    with raises(RedisUnavailable, within=3):
        await queue.schedule(b"x", delay=1)
    gc.collect()


async def test_somebody_listens_and_says_nothing(open_queue):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        queue = open_queue(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0", timeout=1)
        began = time.monotonic()
        with pytest.raises(RedisUnavailable):
            await queue.schedule(b"x", delay=1)
        assert time.monotonic() - began < 2


async def test_a_server_that_went_away(start_redis, redis_server, open_queue):
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, timeout=3)
    await queue.stats()
    server.kill()
    with pytest.raises(RedisUnavailable):
        await queue.schedule(b"x", delay=1)
    server.restart()
    assert (await queue.schedule(b"x", delay=1)).outcome is Outcome.SCHEDULED


@pytest.mark.parametrize("timeout", [0.5, 1.5])
async def test_a_paused_server_leaves_the_outcome_open_within_the_timeout(
    start_redis, redis_server, open_queue, timeout
):
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, timeout=timeout)
    await queue.schedule(b"before", delay=60)
    began = time.monotonic()
    with server.paused(), raises(OutcomeUnknown, match="may have been carried out"):
        await queue.schedule(b"x", delay=60, id="a")
    assert timeout * 0.3 < time.monotonic() - began < timeout + 0.3
    # It had been sent several times; it is stored once.
    await wait_until_async(lambda: queue.get("a"))
    assert (await queue.stats()).waiting == 2


async def test_a_server_silent_from_the_first_connection_on_is_given_up_within_the_timeout(
    start_redis, redis_server, open_queue
):
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, timeout=3)
    began = time.monotonic()
    with server.paused(), raises(OutcomeUnknown, match="schedule"):
        await queue.schedule(b"x", delay=60, id="a")
    assert time.monotonic() - began < 3.3


async def test_a_server_that_comes_back_in_time_is_no_error(start_redis, redis_server, open_queue):
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, timeout=5)
    await queue.stats()
    server.pause()
    timer = threading.Timer(1.8, server.resume)
    timer.start()
    assert (await queue.schedule(b"x", delay=60, id="a")).outcome is Outcome.SCHEDULED
    timer.join()
    assert (await queue.stats()).waiting == 1


async def test_a_callers_client_that_times_out_leaves_the_outcome_open(start_redis, redis_server):
    server = start_redis(redis_server.label)
    options = {"host": server.host, "port": server.port, "socket_timeout": 0.2, "socket_connect_timeout": 0.2}
    client = redis.Redis(**options, retry=Retry(NoBackoff(), 0))
    with client, server.paused(), raises(OutcomeUnknown):
        DelayQueue(client, name=NAME).schedule(b"x", delay=60)
    async_client = redis.asyncio.Redis(**options, retry=AsyncRetry(NoBackoff(), 0))
    async with async_client:
        with server.paused(), raises(OutcomeUnknown):
            await AsyncDelayQueue(async_client, name=NAME).schedule(b"x", delay=60)


class Loading(socketserver.BaseRequestHandler):
    """Answers everything as a server that loads its data does. (A real one is busy, and answers now and then.)"""

    def handle(self):
        with contextlib.suppress(OSError):
            while data := self.request.recv(1 << 16):
                commands = len(re.findall(rb"^\*\d+\r$", data, re.MULTILINE))
                self.request.sendall(b"-LOADING Redis is loading the dataset in memory\r\n" * commands)


async def test_a_loading_server(open_queue):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Loading) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        queue = open_queue(f"redis://127.0.0.1:{server.server_address[1]}/0", timeout=4)
        with raises(RedisUnavailable, within=3, match="loading"):
            await queue.schedule(b"x", delay=1)
        server.shutdown()
        thread.join()


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("secret", ["", ":wrong@", "nobody:wrong@"])
async def test_a_wrong_password(start_redis, redis_server, open_queue, secret):
    server = start_redis(redis_server.label, args=("--requirepass", "right"), password="right")
    queue = open_queue(f"redis://{secret}{server.host}:{server.port}/0", timeout=5)
    with raises(PermissionDenied, within=2, match="password|right"):
        await queue.schedule(b"x", delay=1)
    with raises(PermissionDenied, within=2, match="password|right"):
        await queue.get("a")


async def test_a_full_server(start_redis, redis_server, open_queue):
    server = start_redis(redis_server.label)
    client = server.client()
    queue = open_queue(server.url, timeout=5)
    await queue.schedule_many([NewJob(bytes(1000), 0, id=f"due{n}") for n in range(4)])
    await queue.schedule_many([NewJob(bytes(1000), 60, id=f"wait{n}") for n in range(4)])
    (dead,) = await queue.claim(1)
    await queue.fail([dead], "why", retry_in=None)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    before = snapshot(client)
    for verb in (
        queue.schedule(b"x", delay=1),
        queue.schedule_many([NewJob(b"x", 1)] * 600),
        queue.schedule(b"x", delay=1, id="wait0", if_exists="replace"),
        queue.schedule(b"x", delay=1, id="wait0", if_exists="add"),
        queue.reschedule("wait0", delay=5),
    ):
        with raises(OutOfMemory, match="maxmemory"):
            await verb
    assert snapshot(client) == before
    # Everything that frees memory works, and so does looking.
    claims = await queue.claim()
    assert len(claims) == 3
    claims = await queue.renew(claims)
    assert await queue.ack(claims[:1]) == 1
    assert await queue.fail(claims[1:2], "why", retry_in=0) == 1
    assert await queue.give_back(claims[2:]) == 1
    assert len(await queue.claim()) == 2
    assert await queue.cancel("wait0") is Outcome.CANCELLED
    assert await queue.replay(dead.id) is Outcome.REPLAYED
    assert await queue.fail(await queue.claim(), "again", retry_in=None) == 1
    assert await queue.discard(dead.id) is Outcome.DISCARDED
    assert (await queue.stats()).waiting == 3
    assert (await queue.get("wait1")).state is State.WAITING
    assert len((await queue.jobs()).jobs) == 3
    await queue.purge()


async def test_a_replica(start_redis, redis_server, open_queue):
    primary = start_redis(redis_server.label, args=("--repl-diskless-sync-delay", "0"))
    replica = start_redis(redis_server.label, args=("--replicaof", primary.host, str(primary.port)))
    source = open_queue(primary.url)
    await source.schedule(b"x", delay=60, id="a")
    await source.schedule(b"x", delay=0, id="b")
    with replica.client() as client:
        wait_until(lambda: client.zcard(keys_of(source).due) == 2)
    queue = open_queue(replica.url)
    for verb in (
        queue.schedule(b"x", delay=1),
        queue.cancel("a"),
        queue.reschedule("a", delay=2),
        queue.claim(),
        queue.purge(),
    ):
        with raises(ReadOnlyReplica, match="primary"):
            await verb
    # Looking works.
    assert (await queue.get("a")).payload == b"x"
    assert (await queue.stats()).waiting == 2
    assert len((await queue.jobs()).jobs) == 2


async def test_an_answer_of_no_class(open_queue, redis_server, redis_client, monkeypatch):
    from delayadapters.redis import scripts

    script = scripts.load("get")
    broken = type(script)(script.name, b"return redis.error_reply('ODD nonsense')", b"0" * 40, script.key_names,
                          script.arg_names, script.variadic)  # fmt: skip
    monkeypatch.setattr("delayadapters.redis.commands.load", lambda name: broken)
    queue = open_queue(redis_server.url)
    with raises(ScriptFailed, match="nonsense"):
        await queue.get("a")


# --------------------------------------------------------------------------------------------------------- wrong types


def verbs_of(queue, held):
    return {
        "schedule": lambda: queue.schedule(b"new", delay=5, id="new"),
        "schedule, replace": lambda: queue.schedule(b"new", delay=5, id="a", if_exists="replace"),
        "schedule, add": lambda: queue.schedule(b"new", delay=5, id="a", if_exists="add"),
        "cancel": lambda: queue.cancel("a"),
        "cancel, nobody": lambda: queue.cancel("nobody"),
        "reschedule": lambda: queue.reschedule("a", delay=5),
        "release_now": lambda: queue.release_now("a"),
        "get": lambda: queue.get("a"),
        "replay": lambda: queue.replay("dead"),
        "discard": lambda: queue.discard("dead"),
        "jobs": lambda: queue.jobs(),
        "dead_jobs": lambda: queue.dead_jobs(),
        "stats": lambda: queue.stats(),
        "counters": lambda: queue.counters(),
        "loops": lambda: queue.loops(),
        "claim": lambda: queue.claim(),
        "ack": lambda: queue.ack(held),
        "give_back": lambda: queue.give_back(held),
        "fail": lambda: queue.fail(held, "why", retry_in=1),
        "fail, dead": lambda: queue.fail(held, "why", retry_in=None),
        "renew": lambda: queue.renew(held),
    }


WRONG = {"due": "zset", "leased": "zset", "dead": "zset", "entries": "hash", "seq": "string", "watch": "string",
         "loops": "hash", "calls": "hash", "calls_old": "hash", "released": "set", "released_old": "set",
         "released_new": "list", "counts": "hash"}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
async def test_another_programs_value_under_one_of_our_keys(redis_client, redis_server, open_queue, field):
    queue = open_queue(redis_server.url)
    key = getattr(keys_of(queue), field)
    refused = set()
    for name in verbs_of(queue, []):
        await queue.purge()
        await queue.schedule(b"x", delay=0, id="dead")
        await queue.fail(await queue.claim(), "why", retry_in=None)
        await queue.schedule(b"x", delay=0, id="held")
        held = await queue.claim()
        await queue.schedule(b"x", delay=0, id="a")
        await queue.schedule(b"x", delay=0, id="direct", release=[("SET", "{errors:0}:broker", "x")])
        redis_client.delete(key)
        other = "set" if WRONG[field] == "list" else "list"
        redis_client.sadd(key, "in the way") if other == "set" else redis_client.rpush(key, "1")
        before = snapshot(redis_client)
        try:
            await verbs_of(queue, held)[name]()
        except WrongKeyType as error:
            refused.add(name)
            assert type(error.__cause__).__name__ == "ResponseError"
            assert f"{key.decode()}: {other}, expected {WRONG[field]}" in str(error), error
            assert snapshot(redis_client) == before, f"{name} was half done"
        except DelayError as error:
            pytest.fail(f"{name}: {error!r}")
    redis_client.delete("{errors:0}:broker")
    if field == "watch":
        assert "claim" in refused
    else:
        assert refused, "somebody needs this key"
    await queue.purge()


async def test_a_wrong_type_is_named_whatever_else_is_right(redis_client, redis_server, open_queue):
    queue = open_queue(redis_server.url)
    redis_client.set("{errors:0}:due", "x")
    redis_client.lpush("{errors:0}:released", "x")
    with raises(WrongKeyType) as caught:
        await queue.schedule(b"x", delay=1)
    text = str(caught.value)
    assert "{errors:0}:due: string, expected zset" in text
    assert "{errors:0}:released: list, expected set" in text
    assert "name=" in text
    redis_client.delete("{errors:0}:due", "{errors:0}:released")
    assert (await queue.schedule(b"x", delay=1)).outcome is Outcome.SCHEDULED
    await queue.purge()


# ------------------------------------------------------------------------------------------------------- our own errors


async def test_errors_of_our_own_store_nothing(open_queue, redis_server, redis_client):
    queue = open_queue(redis_server.url, max_payload=10)
    await queue.schedule(b"x", delay=5, id="a")
    before = snapshot(redis_client)
    with pytest.raises(JobExists) as exists:
        await queue.schedule_many([NewJob(b"y", 1, id="b"), NewJob(b"y", 1, id="a")])
    assert exists.value.ids == ["a"]
    with pytest.raises(PayloadTooLarge):
        await queue.schedule_many([NewJob(b"y", 1, id="b"), NewJob(bytes(11), 1, id="c")])
    assert snapshot(redis_client) == before
    await queue.purge()


def test_a_bound_that_is_none_is_refused():
    for timeout in (0, -1, float("nan"), True, "10", None):
        with pytest.raises(ValueError, match="timeout"):
            DelayQueue.from_url("redis://127.0.0.1/0", timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            AsyncDelayQueue.from_url("redis://127.0.0.1/0", timeout=timeout)
