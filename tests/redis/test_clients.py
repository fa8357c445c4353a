"""Every kind of redis-py client does the same: decoding or not, RESP2, RESP3, socket, TLS, ACL, Sentinel, Cluster."""

from __future__ import annotations

import contextlib
import inspect
import ssl
import time
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from delayadapters import (
    AsyncDelayQueue,
    AsyncReleaser,
    DelayQueue,
    NewJob,
    Outcome,
    Payload,
    Releaser,
    State,
)
from delayadapters.redis import aio, commands, sync
from delayadapters.redis.commands import Asker
from delayadapters.redis.connect import next_pause
from delaytests import RedisServer, wait_until, wait_until_async
from delaytests.queues import AsyncFace
from delaytests.topology import Sentinel, cluster_of_one, cluster_port

NAME = "clients"
OPTIONS = inspect.signature(redis.Redis.__init__).parameters

PLAIN = {
    "plain": {},
    "decoding": {"decode_responses": True},
    "decoding latin-1": {"decode_responses": True, "encoding": "latin-1"},
    "resp2": {"protocol": 2},
    "resp3": {"protocol": 3},
    "resp3 decoding": {"protocol": 3, "decode_responses": True},
    "one connection": {"single_connection_client": True},
    "health checks": {"health_check_interval": 1},
    "database 3": {"db": 3},
}
if "legacy_responses" in OPTIONS:
    PLAIN |= {
        f"new responses, {name}": {"legacy_responses": False, **PLAIN[name]}
        for name in ("plain", "decoding", "resp2", "resp3", "resp3 decoding")
    }
RELEASED = (
    "decoding",
    "resp2",
    "resp3",
    "one connection",
    "health checks",
    "database 3",
    "new responses, resp3 decoding",
)
ASYNC = {"sync": False, "async": True}


class Collect:
    """A publisher for both kinds of releaser."""

    def __init__(self):
        self.payloads = []

    def publish(self, claims):
        self.payloads += [claim.payload for claim in claims]


class AsyncCollect(Collect):
    async def publish(self, claims):
        Collect.publish(self, claims)


async def exercise(queue, *, direct=True):
    """Every verb once, with bytes that are no text."""
    payload = bytes(range(256))
    job = await queue.schedule(payload, delay=60, id="ä🙂", meta={"task": "t€"})
    assert job.outcome is Outcome.SCHEDULED
    stored = await queue.get("ä🙂")
    assert (stored.payload, stored.meta, stored.due) == (payload, {"task": "t€"}, job.due)
    assert (await queue.schedule(b"", delay=1, id="ä🙂", if_exists="keep")).payload == payload
    assert (await queue.schedule(payload, delay=50, id="ä🙂", if_exists="replace")).outcome is Outcome.REPLACED
    assert await queue.reschedule("ä🙂", delay=70) is Outcome.RESCHEDULED
    jobs = await queue.schedule_many([NewJob(b"\xff%d" % n, 80 + n, id=f"m{n}") for n in range(20)])
    assert len(jobs) == 20
    first = await queue.jobs(limit=15)
    rest = await queue.jobs(limit=15, cursor=first.cursor)
    assert [one.id for one in (*first.jobs, *rest.jobs)] == ["ä🙂"] + [f"m{n}" for n in range(20)]
    assert rest.cursor is None
    assert (await queue.stats()).waiting == 21
    assert await queue.release_now("ä🙂") is Outcome.RESCHEDULED
    (claim,) = await queue.claim()
    assert (claim.payload, claim.id) == (payload, "ä🙂")
    (claim,) = await queue.renew([claim], lease=60)
    assert await queue.cancel("ä🙂") is Outcome.IN_FLIGHT
    assert await queue.give_back([claim]) == 1
    (claim,) = await queue.claim()
    assert await queue.fail([claim], "weil €", retry_in=None) == 1
    (dead,) = (await queue.dead_jobs()).jobs
    assert (dead.state, dead.reason, dead.payload) == (State.DEAD, "weil €", payload)
    assert await queue.replay("ä🙂") is Outcome.REPLAYED
    claims = await queue.claim()
    assert await queue.ack(claims) == 1
    assert await queue.cancel("ä🙂") is Outcome.RELEASED
    assert await queue.cancel("m3") is Outcome.CANCELLED
    assert await queue.discard("m3") is Outcome.NOT_FOUND
    if direct:
        await queue.schedule(payload, delay=0, id="direct", release=[("RPUSH", "{broker}", Payload.BYTES)])
        assert await queue.claim() == []
        assert await queue.cancel("direct") is Outcome.RELEASED
    await queue.purge()
    assert (await queue.stats()).waiting == 0


async def release(queue, *, direct=True):
    """A releaser releases a job that is due, one that will be, and one directly."""
    wrapped = getattr(queue, "wrapped", queue)
    await queue.schedule(b"\xff now", delay=0)
    if isinstance(wrapped, AsyncDelayQueue):
        publisher = AsyncCollect()
        releaser = AsyncReleaser(wrapped, publisher)
        await releaser.start()
    else:
        publisher = Collect()
        releaser = Releaser(wrapped, publisher)
        releaser.start()
    try:
        await wait_until_async(lambda: publisher.payloads == [b"\xff now"])
        soon = [b"\xff soon%d" % n for n in range(3)]
        for n, payload in enumerate(soon):
            await queue.schedule(payload, delay=0.1 * n)
        await wait_until_async(lambda: sorted(publisher.payloads[1:]) == soon, timeout=5)
        if direct:
            await queue.schedule(b"\xff direct", delay=0.05, release=[("RPUSH", "{broker}", Payload.BYTES)])
            await wait_until_async(lambda: releaser.stats.direct == 1, timeout=5)
        assert releaser.stats.faults == 0
    finally:
        if isinstance(releaser, AsyncReleaser):
            assert await releaser.stop(10)
        else:
            assert releaser.stop(10)
    stats = await queue.stats()
    assert (stats.waiting, stats.leased, stats.dead) == (0, 0, 0)
    assert releaser.stats.released == 4


@contextlib.asynccontextmanager
async def opened(client, *, asynchronous, **options) -> AsyncIterator:
    """A queue on ``client``, with awaited verbs; purged, and the client closed."""
    queue = AsyncDelayQueue(client, **options) if asynchronous else AsyncFace(DelayQueue(client, **options))
    try:
        yield queue
        await queue.purge()
    finally:
        if asynchronous:
            await client.aclose()
        else:
            client.close()


@pytest.fixture(params=ASYNC)
def asynchronous(request):
    return ASYNC[request.param]


@pytest.fixture
def brokers_key(redis_server):
    yield
    for db in (0, 3):
        with redis_server.client(db=db) as client:
            client.delete("{broker}")


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("kind", PLAIN)
async def test_client_options(redis_server, queue_name, asynchronous, kind, brokers_key):
    module = redis.asyncio if asynchronous else redis
    client = module.Redis(host=redis_server.host, port=redis_server.port, socket_timeout=10, **PLAIN[kind])
    async with opened(client, asynchronous=asynchronous, name=queue_name) as queue:
        await exercise(queue)
        if kind in RELEASED:
            await release(queue)


@pytest.mark.parametrize("query", ["", "?protocol=3", "?protocol=2&decode_responses=true", "?socket_timeout=7"])
async def test_from_url(redis_server, queue_name, asynchronous, query, brokers_key):
    url = redis_server.url + query
    if asynchronous:
        async with AsyncDelayQueue.from_url(url, name=queue_name) as queue:
            await exercise(queue)
            await release(queue)
            await queue.purge()
    else:
        with DelayQueue.from_url(url, name=queue_name, max_connections=20) as queue:
            await exercise(AsyncFace(queue))
            await release(AsyncFace(queue))
            queue.purge()


async def test_a_client_of_the_callers_is_left_open(redis_server, queue_name):
    with redis_server.client() as client:
        with DelayQueue(client, name=queue_name) as queue:
            queue.stats()
            connections = len(client.client_list())
        assert len(client.client_list()) == connections
        assert client.ping()
    client = redis.asyncio.Redis(host=redis_server.host, port=redis_server.port)
    async with AsyncDelayQueue(client, name=queue_name) as queue:
        await queue.stats()
    assert await client.ping()
    await client.aclose()


async def test_a_client_of_the_queues_is_closed(redis_server, queue_name, redis_client):
    def ours():
        return [one for one in redis_client.client_list() if one["name"] == queue_name]

    with DelayQueue.from_url(redis_server.url, name=queue_name, client_name=queue_name) as queue:
        queue.stats()
        assert len(ours()) == 1
    wait_until(lambda: ours() == [])
    async with AsyncDelayQueue.from_url(redis_server.url, name=queue_name, client_name=queue_name) as async_queue:
        await async_queue.stats()
        assert len(ours()) == 1
    await wait_until_async(lambda: ours() == [])


async def test_peeking_reads_the_same_in_every_protocol(redis_server, queue_name, asynchronous, clock):
    for options in PLAIN.values():
        module = redis.asyncio if asynchronous else redis
        client = module.Redis(host=redis_server.host, port=redis_server.port, **(options | {"db": 0}))
        async with opened(client, asynchronous=asynchronous, name=queue_name) as queue:
            getattr(queue, "wrapped", queue)._clock = clock

            async def ask(request, client=client):
                if asynchronous:
                    return request.parse(await aio.execute(client, request))
                return request.parse(sync.execute(client, request))

            keys = getattr(queue, "wrapped", queue)._verbs.shards[0]
            asker = Asker.new()
            empty = await ask(commands.peek(keys, asker, watch_ms=60_000, thorough=True))
            assert (empty.watching, empty.head, empty.expires) == (False, None, None)
            due = (await queue.schedule(b"x", delay=5)).due
            await queue.schedule(b"y", delay=0)
            (claim,) = await queue.claim()
            await ask(commands.claim(keys, asker, 1, lease=10**6, limit=1, watch_ms=60_000, now=clock()))
            seen = await ask(commands.peek(keys, asker, watch_ms=60_000, thorough=True))
            assert (seen.watching, seen.head, seen.expires) == (True, due, claim.lease)
            assert seen.now > 1_700_000_000_000_000
            assert 0 < (await ask(commands.probe(keys, asker))).left <= 60_000
            assert set((await ask(commands.types(keys))).values()) == {"zset", "hash", "string", "none"}


# ------------------------------------------------------------------------------------------------------------- places


@pytest.fixture(scope="module")
def tls_server(redis_server):
    server = RedisServer(redis_server.label, tls=True)
    try:
        yield server.start()
    except AssertionError:
        if any(words in server.log() for words in ("tls-port", "TLS support")):
            pytest.skip(f"{server.binary} was built without TLS")
        raise
    finally:
        server.close()


async def test_a_unix_socket(redis_server, start_redis, asynchronous):
    server = start_redis(redis_server.label, unixsocket=True)
    make = AsyncDelayQueue.from_url if asynchronous else DelayQueue.from_url
    queue = make(server.unix_url, name=NAME)
    face = queue if asynchronous else AsyncFace(queue)
    await exercise(face)
    await release(face)
    await queue.aclose() if asynchronous else queue.close()


async def test_tls(tls_server, asynchronous):
    make = AsyncDelayQueue.from_url if asynchronous else DelayQueue.from_url
    queue = make(tls_server.url, name=NAME)
    face = queue if asynchronous else AsyncFace(queue)
    await exercise(face)
    await release(face)
    await queue.aclose() if asynchronous else queue.close()


async def test_tls_with_an_unknown_authority_is_unavailable(tls_server, asynchronous):
    from delayadapters import RedisUnavailable

    url = f"rediss://{tls_server.host}:{tls_server.port}/0"
    make = AsyncDelayQueue.from_url if asynchronous else DelayQueue.from_url
    queue = make(url, name=NAME, timeout=3)
    with pytest.raises(RedisUnavailable) as caught:
        await queue.stats() if asynchronous else queue.stats()
    chain = []
    error = caught.value
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(one, ssl.SSLError) or "certificate" in str(one).lower() for one in chain)
    await queue.aclose() if asynchronous else queue.close()


async def test_a_password_and_an_acl_user(redis_server, start_redis, asynchronous):
    server = start_redis(redis_server.label, args=("--requirepass", "s3cret"), password="s3cret")
    server.client().execute_command("ACL", "SETUSER", "delay", "on", ">p:w", "~*", "&*", "+@all")
    make = AsyncDelayQueue.from_url if asynchronous else DelayQueue.from_url
    for url in (server.url, f"redis://delay:p%3Aw@{server.host}:{server.port}/0"):
        queue = make(url, name=NAME)
        face = queue if asynchronous else AsyncFace(queue)
        await exercise(face)
        await release(face)
        await queue.aclose() if asynchronous else queue.close()


# ----------------------------------------------------------------------------------------------------------- Sentinel


async def test_sentinel(redis_server, start_redis, asynchronous):
    primary = start_redis(redis_server.label)
    with Sentinel(primary, primary.binary) as watcher:
        kind = redis.asyncio.sentinel.Sentinel if asynchronous else redis.sentinel.Sentinel
        sentinel = kind([("127.0.0.1", watcher.port)], socket_timeout=5)
        for options in ({}, {"decode_responses": True}):
            client = sentinel.master_for(watcher.name, **options)
            async with opened(client, asynchronous=asynchronous, name=NAME) as queue:
                await exercise(queue)
                await release(queue)
        for one in sentinel.sentinels:
            await one.aclose() if asynchronous else one.close()


async def test_a_sentinel_without_a_primary_is_unavailable(redis_server, start_redis, asynchronous):
    from delayadapters import OutcomeUnknown, RedisUnavailable

    primary = start_redis(redis_server.label)
    with Sentinel(primary, primary.binary) as watcher:
        kind = redis.asyncio.sentinel.Sentinel if asynchronous else redis.sentinel.Sentinel
        sentinel = kind([("127.0.0.1", watcher.port)], socket_timeout=5)
        client = sentinel.master_for("nobody")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.aclose) if asynchronous else stack.callback(client.close)
            queue = AsyncDelayQueue(client) if asynchronous else AsyncFace(DelayQueue(client))
            with pytest.raises(RedisUnavailable) as caught:
                await queue.schedule(b"x", delay=1)
            assert type(caught.value.__cause__).__name__ == "MasterNotFoundError"
            assert isinstance(caught.value, OutcomeUnknown), "a client's own retries may have got through before"
        for one in sentinel.sentinels:
            await one.aclose() if asynchronous else one.close()


# ------------------------------------------------------------------------------------------------------------ Cluster


@pytest.fixture(scope="module")
def cluster(redis_server):
    """One for all tests: a node takes commands only two seconds after its start."""
    with RedisServer(redis_server.label, args=("--cluster-enabled", "yes"), port=cluster_port()) as server:
        yield cluster_of_one(server)


CLUSTER = {"plain": {}, "decoding": {"decode_responses": True}, "resp3": {"protocol": 3}}


@contextlib.asynccontextmanager
async def on_cluster(server, asynchronous, **options):
    shards = options.pop("shards", 4)
    if asynchronous:
        from redis.asyncio.cluster import RedisCluster
    else:
        from redis.cluster import RedisCluster
    client = RedisCluster(host=server.host, port=server.port, **options)
    async with opened(client, asynchronous=asynchronous, name=NAME, shards=shards) as queue:
        yield queue


@pytest.mark.parametrize("kind", CLUSTER)
async def test_cluster_verbs(cluster, asynchronous, kind):
    async with on_cluster(cluster, asynchronous, **CLUSTER[kind]) as queue:
        await exercise(queue, direct=False)
    if kind == "plain":
        async with on_cluster(cluster, asynchronous, shards=1) as queue:
            await exercise(queue, direct=False)


@pytest.mark.parametrize("kind", CLUSTER)
async def test_cluster_release(cluster, asynchronous, kind):
    async with on_cluster(cluster, asynchronous, **CLUSTER[kind]) as queue:
        await release(queue, direct=False)


async def test_a_loop_in_a_cluster_trusts_no_plain_time(cluster, asynchronous):
    async with on_cluster(cluster, asynchronous, shards=1) as queue:
        wrapped = getattr(queue, "wrapped", queue)
        kind, publisher = (AsyncReleaser, AsyncCollect()) if asynchronous else (Releaser, Collect())
        releaser = kind(wrapped, publisher)
        await releaser.start() if asynchronous else releaser.start()
        (shard,) = releaser._shards
        assert shard.loop._times is False
        assert await releaser.stop(30) if asynchronous else releaser.stop(30)


async def test_cluster_peek(cluster, asynchronous):
    """What an idle watcher sends, the server's clock included."""
    async with on_cluster(cluster, asynchronous) as queue:
        wrapped = getattr(queue, "wrapped", queue)
        due = (await queue.schedule(b"x", delay=50, id="a")).due
        for keys in wrapped._verbs.shards:
            request = commands.peek(keys, Asker.new(), watch_ms=1000, thorough=True)
            if asynchronous:
                seen = request.parse(await aio.execute(wrapped.client, request))
            else:
                seen = request.parse(sync.execute(wrapped.client, request))
            assert seen.head in (None, due)
            assert abs(seen.now + 50_000_000 - due) < 10_000_000


async def test_cluster_direct_release_into_the_same_slot(cluster, asynchronous):
    async with on_cluster(cluster, asynchronous, shards=1) as queue:
        key = f"{{{NAME}:0}}:broker"
        await queue.schedule(b"x", delay=0, release=[("RPUSH", key, Payload.BYTES)])
        assert await queue.claim() == []
        client = cluster.client()
        assert client.lrange(key, 0, -1) == [b"x"]
        client.delete(key)


async def test_a_plain_client_of_a_cluster_node_works_with_one_shard(cluster, asynchronous):
    client = cluster.async_client() if asynchronous else cluster.client()
    async with opened(client, asynchronous=asynchronous, name=NAME) as queue:
        await exercise(queue, direct=False)
        await release(queue, direct=False)


def test_a_failover_behind_sentinel_is_given_the_whole_timeout() -> None:
    """A server that refuses connections is given about a second."""
    deadline = time.monotonic() + 60
    for found_none in (redis.sentinel.MasterNotFoundError, redis.asyncio.sentinel.MasterNotFoundError):
        assert next_pause(9, found_none("No master found for 'mine'"), deadline, 1.0) is not None
    assert next_pause(9, redis.ConnectionError("Error 111 connecting. Connection refused."), deadline, 1.0) is None
