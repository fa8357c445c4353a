"""Publishers that do not keep to the protocol, clients that are unusual, releasers that are stopped too soon."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis
import redis.asyncio

from delayadapters import AsyncDelayQueue, AsyncReleaser, BrokerDown, DelayQueue, Published, Releaser
from delayadapters.redis.commands import Asker, claim
from delayadapters.redis.sync import execute
from delaytests import wait_until, wait_until_async
from delaytests.releasers import Ledger


def test_a_publisher_that_answers_nonsense_does_not_end_the_loop(queue, release):
    answers = iter([True, 0, "done"])
    running = release(lambda batch: next(answers, None), max_attempts=5, backoff=0.05)
    queue.schedule(b"x", delay=0, id="a")
    wait_until(lambda: running.stats.released == 1)
    assert running.stats.failed == 3


def test_reasons_that_are_exceptions_are_written_down(queue, release):
    running = release(lambda batch: Published(failed={batch[0].entry: ValueError("too long")}), max_attempts=1)
    queue.schedule(b"x", delay=0, id="a")
    (dead,) = wait_until(lambda: queue.dead_jobs().jobs)
    assert dead.reason == "too long"
    assert running.stats.dead == 1


@pytest.mark.parametrize(
    "error",
    [
        BrokerDown("maintenance"),
        redis.ConnectionError("Error 111 connecting"),
        redis.TimeoutError("Timeout reading from socket"),
        ConnectionResetError(104, "reset"),
        EOFError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_client_library_that_cannot_connect_burns_no_attempts(queue, release, error):
    failing = [error, error]

    def before(batch):
        if failing:
            raise failing.pop()

    done = Ledger(before)
    running = release(done)
    queue.schedule(b"x", delay=0, id="a")
    wait_until(lambda: done.ids == ["a"])
    assert done.lines[0].attempts == 0
    assert running.stats.failed == 0
    assert running.stats.pauses == 2


def test_a_copy_of_a_claim_that_comes_while_its_batch_is_published_changes_nothing(queue, release, admin):
    """A network that holds a request back delivers it after the loop has sent it again, and been answered."""
    keys = queue._verbs.shards[0]

    def before(batch):
        ((owner, last),) = admin.hgetall(keys.loops).items()
        number = int(last.split()[0])
        for late in (number, number - 1):
            request = claim(keys, Asker(owner), late, lease=30_000_000, limit=100)
            request.parse(execute(admin, request))

    done = Ledger(before)
    running = release(done)
    for n in range(5):
        queue.schedule(b"", delay=0, id=f"{n}")
    wait_until(lambda: running.stats.released == 5)
    assert running.stats.stale_acks == 0
    assert sorted(done.ids) == list("01234")
    assert queue.stats().leased == 0


class Nothing:
    def publish(self, claims):
        return None


class NothingAsync:
    async def publish(self, claims):
        return None


def test_a_releaser_stopped_before_it_runs_does_not_run(queue):
    releaser = Releaser(queue, Nothing())
    assert releaser.stop()
    running = threading.Thread(target=releaser.run)
    running.start()
    running.join(30)
    assert not running.is_alive()
    assert not releaser.running


async def test_an_async_releaser_stopped_before_it_runs_does_not_run(server, name):
    async with AsyncDelayQueue.from_url(server.url, name=name) as queue:
        releaser = AsyncReleaser(queue, NothingAsync())
        running = asyncio.create_task(releaser.run())
        assert await releaser.stop()
        await asyncio.wait_for(running, 30)
        assert not releaser.running


class OwnRedis(redis.Redis):
    """As ArqRedis and others: a subclass with arguments of its own."""

    def __init__(self, pool, *, flavour):
        super().__init__(connection_pool=pool)
        self.flavour = flavour


class OwnAsyncRedis(redis.asyncio.Redis):
    def __init__(self, pool, *, flavour):
        super().__init__(connection_pool=pool)
        self.flavour = flavour


def test_a_client_of_a_subclass_is_served(server, delays, name):
    delays()
    with OwnRedis(redis.ConnectionPool.from_url(server.url), flavour="sweet") as client:
        queue = DelayQueue(client, name=name)
        with Releaser(queue, Nothing()) as releaser:
            queue.schedule(b"x", delay=0)
            wait_until(lambda: releaser.stats.released == 1)


async def test_an_async_client_of_a_subclass_is_served(server, delays, name):
    delays()
    pool = redis.asyncio.ConnectionPool.from_url(server.url)
    client = OwnAsyncRedis(pool, flavour="sweet")
    queue = AsyncDelayQueue(client, name=name)
    async with AsyncReleaser(queue, NothingAsync()) as releaser:
        await queue.schedule(b"x", delay=0)
        await wait_until_async(lambda: releaser.stats.released == 1)
    await client.aclose()
    await pool.disconnect()
