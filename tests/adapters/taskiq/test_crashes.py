"""SIGKILL in each gap: nothing lost; with direct release nothing doubled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter

import pytest
import redis
from taskiq_redis import ListQueueBroker, RedisStreamBroker

from delayadapters import DelayQueue
from delayadapters.taskiq import DelayMiddleware
from delaytests import wait_until, wait_until_async
from delaytests.taskiqs import started

JOBS = 1000


def schedule(server, queue_name, count, over, cls=ListQueueBroker, url=None, name="note", delay=2.0, **labels):
    """``count`` tasks, due within ``over`` seconds, ``delay`` seconds from now."""

    async def go():
        broker = cls(url or server.url, queue_name=queue_name, socket_timeout=None)
        broker.with_middlewares(DelayMiddleware(server.url, timeout=60))

        @broker.task(task_name=name, **labels)
        def stub(*_): ...

        due = time.time() + delay
        kickers = [stub.kicker().with_labels(delay=delay + over * n / count) for n in range(count)]
        await asyncio.gather(*(kicker.kiq(n, due + over * n / count) for n, kicker in enumerate(kickers)))
        await broker.shutdown()

    asyncio.run(go())


def numbers(client, key="ran"):
    return Counter(int(line.split()[0]) for line in client.lrange(key, 0, -1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["direct", "leased"])
def test_three_workers_one_is_killed_mid_release(app, server, client, queue_name, mode, tmp_path):
    """The list of tasks is on the same server (direct), or as it were on another: by another database (leased). The
    killed process releases only, so that no task dies in its hands."""
    url = server.url if mode == "direct" else server.url.replace("/0", "/7")
    app.env |= {"BROKER_URL": url, "LEASE": "2"}
    worker = app.start("worker", "delay_taskiq_app:broker", "--workers", "1", EMBED="0")
    releasers = [app.start("delay-release", "delay_taskiq_app:broker") for _ in range(3)]
    app.wait_for(worker, "Listening started")
    for process in releasers:
        app.wait_for(process, "delay release: queue")
    jobs = JOBS if mode == "direct" else 400
    schedule(server, queue_name, jobs, 1.0, url=url)
    wait_until(lambda: sum(numbers(client).values()) > jobs // 10, timeout=90)
    killed = 0
    while killed < 2:
        os.kill(releasers[killed].pid, signal.SIGKILL)
        killed += 1
        time.sleep(0.2)
    wait_until(lambda: len(numbers(client)) == jobs, timeout=90, message="every task has run")
    if mode == "direct":
        time.sleep(0.3)
        assert numbers(client).most_common(1)[0][1] == 1, "none twice"
    else:
        assert sum(numbers(client).values()) - jobs <= 25 * killed, "only what was in a killed process's hands"
    with DelayQueue.from_url(server.url, name=_name(url, queue_name)) as queue:
        wait_until(lambda: (queue.stats().waiting, queue.stats().leased) == (0, 0))


def _name(url, queue_name, kind="list"):
    return f"delayadapters:taskiq:{kind}:{url.rsplit('/', 1)[1]}:{queue_name}"


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "sent"), [("claimed", 0), ("kicked", 1)])
def test_killed_in_each_gap_of_a_leased_release(app, server, queue_name, gap, sent):
    """Between the claim and the broker, and between the broker and the ack. (A direct release has no gap.)"""
    url = server.url.replace("/0", "/7")
    app.env |= {"BROKER_URL": url, "LEASE": "1"}
    schedule(server, queue_name, 10, 0.0, url=url, delay=0.01)
    dying = app.start("delay-release", "delay_taskiq_app:broker", KILL_AT=gap)
    assert dying.wait(90) == -signal.SIGKILL, app.log(dying)
    list_of_tasks = redis.Redis.from_url(url)

    def there():
        return [json.loads(message)["task_id"] for message in list_of_tasks.lrange(queue_name, 0, -1)]

    async def another():
        """In this process; answers when it has nothing left to do."""
        broker = ListQueueBroker(url, queue_name=queue_name, socket_timeout=None)
        delay = DelayMiddleware(server.url)
        delay.release_here = True
        broker.with_middlewares(delay)
        async with started(broker):
            before = await delay.queue.stats()
            assert before.waiting + before.leased == 10, "nothing is forgotten before the ack"

            async def all_gone():
                now = await delay.queue.stats()
                return now.waiting + now.leased == 0

            await wait_until_async(all_gone, timeout=90)

    assert len(there()) == sent
    asyncio.run(another())
    assert len(set(there())) == 10, "none lost"
    assert len(there()) == 10 + sent, "twice only what the broker had and nobody had acknowledged, under its own id"
    list_of_tasks.close()


@pytest.mark.slow
def test_three_workers_one_is_killed_stream(app, server, client, queue_name):
    """A stream gives back what a killed worker had not acknowledged. So nothing is lost; and what runs twice was in the
    hands of the killed one: the stream itself has every task once."""
    app.env |= {"BROKER": "RedisStreamBroker", "IDLE": "1000"}
    workers = [app.start("worker", "delay_taskiq_app:broker", "--workers", "1") for _ in range(3)]
    for worker in workers:
        app.wait_for(worker, "Listening started")
    schedule(server, queue_name, JOBS, 1.0, cls=RedisStreamBroker)
    wait_until(lambda: sum(numbers(client).values()) > JOBS // 10, timeout=90)
    app.kill(workers[0])

    def poke():
        # taskiq-redis looks for abandoned messages only after it has got a new one.
        if len(numbers(client)) < JOBS:
            schedule(server, queue_name, 1, 0, cls=RedisStreamBroker, name="nobody-knows", delay=0.01)
            time.sleep(0.4)
        return len(numbers(client)) == JOBS

    wait_until(poke, timeout=90, message="every task has run")
    assert client.xinfo_stream(queue_name)["entries-added"] - _others(client, queue_name) == JOBS, "released once each"


def _others(client, queue_name):
    return sum(b"nobody-knows" in fields[b"data"] for _, fields in client.xrange(queue_name))


@pytest.mark.slow
def test_killed_between_the_retry_and_the_ack(app, server, client, queue_name):
    """The worker's process ends right after its retry is stored, unacknowledged. The stream delivers the attempt again,
    to a second worker, which stores the same retry: it waits once."""
    app.env |= {"BROKER": "RedisStreamBroker", "IDLE": "100"}
    schedule(server, queue_name, 1, 0, cls=RedisStreamBroker, name="hang", delay=0.01, retry_on_error=True)
    app.start("worker", "delay_taskiq_app:broker", "--workers", "1", KILL_BEFORE_ACK="1")
    with DelayQueue.from_url(server.url, name=_name(server.url, queue_name, "stream")) as queue:
        wait_until(lambda: client.llen("failed") and queue.stats().waiting == 1, timeout=90)
        app.kill(app.processes[0])
        (before,) = queue.jobs().jobs
        app.worker()

        def redelivered():
            schedule(server, queue_name, 1, 0, cls=RedisStreamBroker, name="nobody-knows", delay=0.01)
            time.sleep(0.3)
            return client.llen("failed") >= 2

        wait_until(redelivered, timeout=90)
        wait_until(lambda: client.xpending(queue_name, "taskiq")["pending"] == 0)
        assert [job.due for job in queue.jobs().jobs] == [before.due], "the first one stays, the second is not stored"
