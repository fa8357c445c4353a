"""A replica takes over: clients and release loops of a Sentinel's primary follow, nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from delayadapters import AsyncDelayQueue, AsyncReleaser, DelayError, DelayQueue, NewJob, Outcome, Releaser
from delaytests import wait_until
from delaytests.releasers import Ledger
from delaytests.topology import Sentinel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE = 90  # a Sentinel that is held up by a busy machine does nothing for half a minute


class AsyncLedger:
    def __init__(self, ledger):
        self.ledger = ledger

    async def publish(self, batch):
        self.ledger(batch)


class Publisher:
    def __init__(self, ledger):
        self.publish = ledger


class Loop:
    """A releaser whose client has the time-outs redis-py gives it: for redis-py 5 none at all."""

    def __init__(self, shell, port, ledger):
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.stats = None
        work = self.threads if shell == "thread" else lambda *args: asyncio.run(self.asyncio(*args))
        self.thread = threading.Thread(target=work, args=(port, ledger), daemon=True)
        self.thread.start()
        assert self.ready.wait(30)

    def threads(self, port, ledger):
        sentinel = redis.sentinel.Sentinel([("127.0.0.1", port)], sentinel_kwargs={"socket_timeout": 2})
        with (
            sentinel.master_for(Sentinel.name) as client,
            Releaser(DelayQueue(client, name="q"), Publisher(ledger)) as releaser,
        ):
            self.stats = releaser.stats
            self.ready.set()
            self.stop.wait()
        for one in sentinel.sentinels:
            one.close()

    async def asyncio(self, port, ledger):
        sentinel = redis.asyncio.sentinel.Sentinel([("127.0.0.1", port)], sentinel_kwargs={"socket_timeout": 2})
        client = sentinel.master_for(Sentinel.name)
        async with AsyncReleaser(AsyncDelayQueue(client, name="q"), AsyncLedger(ledger)) as releaser:
            self.stats = releaser.stats
            self.ready.set()
            await asyncio.to_thread(self.stop.wait)
        await client.aclose()
        for one in sentinel.sentinels:
            await one.aclose()

    def end(self):
        self.stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


def jobs(prefix, delay):
    return [NewJob(b"x", delay=delay, id=f"{prefix}-{n:02d}") for n in range(20)]


@pytest.mark.parametrize("how", ["handed over", "hanging"])
def test_a_replica_takes_over(start_redis, shell, how):
    """Handed over: the old primary lives on as a replica. Hanging: its sockets stay open, and nothing answers."""
    primary = start_redis(args=("--repl-diskless-sync-delay", "0"))
    replica = start_redis(args=("--replicaof", primary.host, str(primary.port)))
    wait_until(lambda: primary.client().info("replication").get("slave0", {}).get("state") == "online")
    with Sentinel(primary, primary.binary, down_after=1500) as watcher:
        wait_until(lambda: watcher.replicas() == 1, timeout=PATIENCE)
        sentinel = redis.sentinel.Sentinel([("127.0.0.1", watcher.port)], socket_timeout=2)
        client = sentinel.master_for(Sentinel.name, socket_timeout=2)
        queue, done = DelayQueue(client, name="q"), Ledger()
        loop = Loop(shell, watcher.port, done)
        try:
            queue.schedule_many(jobs("before", 0.1))
            wait_until(lambda: loop.stats.released == 20)
            queue.schedule_many(jobs("across", 3600))
            assert primary.client().wait(1, 10_000) == 1
            if how == "hanging":
                primary.pause()
            else:
                with redis.Redis(port=watcher.port, socket_timeout=10) as admin:
                    admin.execute_command("SENTINEL", "FAILOVER", watcher.name)
            new = replica.client()
            wait_until(lambda: new.info("replication")["role"] == "master", timeout=PATIENCE)
            if how == "handed over":  # until then what is done to the old one is lost: a failover's, not ours
                wait_until(lambda: primary.client().info("replication")["role"] == "slave", timeout=PATIENCE)
            ids = [job.id for job in jobs("across", 0)]

            def bring_forward():
                try:
                    return queue.reschedule_many(ids, delay=0.1)
                except DelayError:  # a client of the caller's has its own retries only
                    return None

            assert set(wait_until(bring_forward, timeout=PATIENCE)) == {Outcome.RESCHEDULED}
            assert queue.schedule(b"x", delay=0.2, id="after").outcome is Outcome.SCHEDULED
            wait_until(lambda: loop.stats.released == 41, timeout=PATIENCE)
            assert sorted(done.ids) == sorted([*(job.id for job in jobs("before", 0)), *ids, "after"])
            assert min(line.lateness for line in done.lines) >= 0
            assert new.zcard("{q:0}:leased") == new.zcard("{q:0}:due") == 0
            assert loop.stats.requeued == 0
        finally:
            primary.resume()
            loop.end()
            client.close()
            for one in sentinel.sentinels:
                one.close()
