"""wait_replicas and wait_aof: schedule returns when the job is as safe as asked, or says that it is not yet."""

from __future__ import annotations

import contextlib
import time

import pytest

from delayadapters import AsyncDelayQueue, DelayQueue, JobExists, NewJob, ReplicationTimeout
from delayadapters.redis.sync import execute
from delaytests import wait_until
from delaytests.queues import AsyncFace
from delaytests.raw import keys_of

NAME = "replicated"


@pytest.fixture(params=["sync", "async"])
async def open_queue(request):
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


@pytest.fixture
def pair(start_redis, redis_server):
    primary = start_redis(redis_server.label, args=("--repl-diskless-sync-delay", "0"))
    replica = start_redis(redis_server.label, args=("--replicaof", primary.host, str(primary.port)))
    client = primary.client()
    wait_until(lambda: "state=online" in str(client.execute_command("INFO", "replication", NEVER_DECODE=True))
               or client.info("replication").get("slave0", {}).get("state") == "online")  # fmt: skip
    return primary, replica


async def test_a_replica_has_what_schedule_returned(pair, open_queue):
    primary, replica = pair
    queue = open_queue(primary.url, wait_replicas=1, wait_timeout=2)
    primary.client().script_flush()
    for n in range(20):
        await queue.schedule(b"x", delay=60, id=f"a{n}")
        assert replica.client().zcard(keys_of(queue).due) == n + 1
    await queue.schedule_many([NewJob(b"x", 60) for _ in range(1200)])
    assert replica.client().zcard(keys_of(queue).due) == 1220
    # Everything else waits for nobody.
    with replica.paused():
        began = time.monotonic()
        await queue.cancel("a1")
        await queue.stats()
        assert time.monotonic() - began < 1


async def test_a_replica_that_does_not_answer(pair, open_queue):
    primary, replica = pair
    queue = open_queue(primary.url, wait_replicas=1, wait_timeout=0.3)
    with replica.paused():
        began = time.monotonic()
        with pytest.raises(ReplicationTimeout, match="will still be released"):
            await queue.schedule(b"x", delay=0, id="a")
        assert 0.25 < time.monotonic() - began < 1.5
        assert (await queue.get("a")).payload == b"x"
        assert [claim.id for claim in await queue.claim()] == ["a"]


async def test_more_replicas_than_there_are(pair, open_queue):
    queue = open_queue(pair[0].url, wait_replicas=2, wait_timeout=0.2)
    with pytest.raises(ReplicationTimeout, match="2 replicas"):
        await queue.schedule(b"x", delay=60, id="a")
    assert (await queue.get("a")).payload == b"x"


async def test_what_was_not_stored_is_not_said_to_be(pair, open_queue):
    """The script's answer comes first: taken ids are taken, and a call that has to be asked in parts is."""
    queue = open_queue(pair[0].url, wait_replicas=2, wait_timeout=0.05)
    careless = open_queue(pair[0].url)
    await careless.schedule(b"old", delay=60, id="taken")
    with pytest.raises(JobExists, match="taken"):
        await queue.schedule(b"new", delay=60, id="taken")
    with pytest.raises(JobExists, match="taken"):
        await queue.schedule_many([NewJob(b"new", 60, id=id) for id in ("a", "b", "taken")])
    assert await queue.get("a") is None
    assert (await queue.get("taken")).payload == b"old"
    large = [f"large-{n}" for n in range(60)]
    await careless.schedule_many([NewJob(b"x" * 40_000, 60, id=id) for id in large])
    with pytest.raises(ReplicationTimeout):
        await queue.schedule_many([NewJob(b"new", 60, id=id) for id in large], if_exists="replace")
    assert {(await queue.get(id)).payload for id in large} == {b"new"}
    with pytest.raises(ReplicationTimeout):
        await queue.schedule_many([NewJob(b"kept", 60, id=id) for id in [*large, "one-more"]], if_exists="keep")
    assert (await queue.get("one-more")).payload == b"kept"


async def test_the_append_only_file(start_redis, redis_server, open_queue):
    if redis_server.version < (7, 2):
        pytest.skip("WAITAOF came with Redis 7.2")
    server = start_redis(redis_server.label, aof="everysec")
    queue = open_queue(server.url, wait_aof=True, wait_timeout=2.5)
    await queue.schedule(b"x", delay=60, id="a")
    server.kill()
    server.restart()
    assert (await queue.get("a")).payload == b"x"
    assert await queue.schedule_many([NewJob(b"y", 60)])


async def test_the_append_only_file_and_replicas(start_redis, redis_server, open_queue):
    if redis_server.version < (7, 2):
        pytest.skip("WAITAOF came with Redis 7.2")
    server = start_redis(redis_server.label, aof="always")
    queue = open_queue(server.url, wait_aof=True, wait_replicas=1, wait_timeout=0.2)
    with pytest.raises(ReplicationTimeout, match="1 replicas and the append-only file"):
        await queue.schedule(b"x", delay=60, id="a")
    assert (await queue.get("a")).payload == b"x"


async def test_a_server_that_cannot_wait_says_that_the_job_is_stored(start_redis, redis_server, open_queue):
    """No append-only file, or no WAITAOF at all."""
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, wait_aof=True)
    with pytest.raises(ReplicationTimeout) as caught:
        await queue.schedule(b"x", delay=60, id="a")
    assert caught.value.__cause__ is not None
    assert "stored" in str(caught.value)
    assert "WAITAOF" in str(caught.value)
    assert (await queue.get("a")).payload == b"x"


async def test_a_wait_longer_than_a_try_is_refused(open_queue):
    """It would end in OutcomeUnknown; better to hear of it at the start."""
    url = "redis://127.0.0.1/0"
    for options in (
        {"wait_timeout": 3, "timeout": 10},
        {"timeout": 3},
        {"wait_timeout": 2, "timeout": 60, "socket_timeout": 2},
    ):
        with pytest.raises(ValueError, match="wait_timeout"):
            open_queue(url, wait_replicas=1, **options)
        open_queue(url, **options)
    open_queue(url, wait_replicas=1, wait_timeout=1.5, timeout=6)
    open_queue(url, wait_aof=True, wait_timeout=1.5, timeout=1, socket_timeout=None)


@pytest.mark.parametrize(
    "options",
    [{"wait_replicas": -1}, {"wait_replicas": True}, {"wait_replicas": 1.5}, {"wait_replicas": 1, "wait_timeout": 0}],
    ids=str,
)
async def test_bad_values(open_queue, options):
    with pytest.raises(ValueError, match="wait_"):
        open_queue("redis://127.0.0.1/0", **options)


async def test_a_batch_that_is_not_confirmed_is_stored_all_the_same(start_redis, redis_server, open_queue):
    """The first round trip that is not confirmed must not keep the others from being sent."""
    server = start_redis(redis_server.label)
    queue = open_queue(server.url, wait_replicas=1, wait_timeout=0.05)
    with pytest.raises(ReplicationTimeout, match="will still be released"):
        await queue.schedule_many([NewJob(b"x", 60) for _ in range(500)])
    assert (await queue.stats()).waiting == 500


def test_a_repeated_call_waits_for_the_replica_as_the_first_did(pair):
    """On a new connection there is no write to wait for, unless the repetition writes: Redis 8 answers at once then."""
    primary, replica = pair
    queue = DelayQueue.from_url(primary.url, name=NAME, wait_replicas=1, wait_timeout=0.3)
    steps = queue._verbs.schedule(b"x", 60, None, "once", None, "error", None)
    request = next(steps)
    with replica.paused():
        request.parse(execute(primary.client(), request))
        with pytest.raises(ReplicationTimeout):
            execute(primary.client(), request, queue._waiting)
        with pytest.raises(ReplicationTimeout):
            queue.schedule(b"y", delay=60, id="once", if_exists="keep")
    wait_until(lambda: replica.client().zcard(keys_of(queue).due) == 1)
    queue.close()
