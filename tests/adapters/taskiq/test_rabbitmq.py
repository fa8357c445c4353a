"""taskiq-aio-pika on a real RabbitMQ. Without one these tests are skipped; with CI set they fail."""

from __future__ import annotations

import os
import socket
import time
from urllib.parse import urlsplit

import aio_pika
import pytest
from taskiq import SmartRetryMiddleware
from taskiq.exceptions import SendTaskError
from taskiq_aio_pika import AioPikaBroker, Exchange, Queue, QueueType

from delayadapters.taskiq import BrokerNotStarted
from delaytests import wait_until_async
from delaytests.taskiqs import started, working

URL = os.environ.get("DELAY_TEST_RABBIT", "amqp://guest:guest@127.0.0.1:5672//")


@pytest.fixture(scope="module", autouse=True)
def _rabbit():
    parts = urlsplit(URL)
    try:
        socket.create_connection((parts.hostname, parts.port or 5672), 5).close()
    except OSError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no RabbitMQ at {parts.hostname}:{parts.port}: {error}")
        pytest.skip(f"no RabbitMQ at {parts.hostname}:{parts.port}: {error}")


@pytest.fixture
async def rabbit(make_broker, queue_name):
    """``rabbit(*queues, **options)``: a broker with an exchange and queues of this test's own, deleted afterwards."""
    names, exchanges = {f"{queue_name}-dead"}, {queue_name}

    def make(*queues, **options):
        made = [Queue(name=name, type=QueueType.CLASSIC) for name in queues or (queue_name,)]
        names.update(queue.name for queue in made)
        if options.get("delay_queue"):
            names.add(options["delay_queue"].name)
        return make_broker(
            AioPikaBroker,
            **{
                "url": URL,
                "exchange": Exchange(name=queue_name),
                "task_queues": made,
                "dead_letter_queue": Queue(name=f"{queue_name}-dead", type=QueueType.CLASSIC),
                **options,
            },
        )

    yield make
    connection = await aio_pika.connect(URL)
    async with connection:
        channel = await connection.channel()
        for name in names:
            await channel.queue_delete(name)
        for name in exchanges:
            await channel.exchange_delete(name)


async def messages(queue_name, count, *, distinct=False):
    """So many messages (of so many tasks), taken from a queue."""
    found = []
    async with await aio_pika.connect(URL) as connection:
        queue = await (await connection.channel()).get_queue(queue_name)

        async def enough():
            if (message := await queue.get(no_ack=True, fail=False)) is not None:
                found.append(message)
            return len({one.headers["task_id"] for one in found} if distinct else found) == count

        await wait_until_async(enough)
    return found


def add_task(broker):
    @broker.task(task_name="late")
    async def late(due):
        return time.time() - due

    return late


async def test_delayed_tasks(rabbit):
    broker = rabbit()
    task = add_task(broker)
    async with working(broker):
        tasks = [await task.kicker().with_labels(delay=0.2).kiq(time.time() + 0.2) for _ in range(150)]
        lateness = [(await one.wait_result(0.01, 20)).return_value for one in tasks]
        assert broker.delay.releaser_stats.released == 150
    assert min(lateness) > -0.001


async def test_no_plugin_no_delay_queue_and_no_second_delay(rabbit, queue_name):
    """Its own way would refuse a delay without either, and with a delay queue delay the released message again."""
    broker = rabbit(delay_queue=Queue(name=f"{queue_name}-delay", type=QueueType.CLASSIC))
    broker.add_middlewares(SmartRetryMiddleware(default_delay=0.1, default_retry_count=2))
    task = add_task(broker)
    times = []

    @broker.task(retry_on_error=True, delay=1.5)
    async def fail():
        times.append(time.time())
        raise ValueError

    async with working(broker):
        one = await task.kicker().with_labels(delay=2).kiq(time.time() + 2)
        began = time.time()
        other = await fail.kiq()
        assert (await one.wait_result(0.01, 20)).return_value < 1.9, "delayed once"
        assert (await other.wait_result(0.01, 20)).is_err
        await wait_until_async(lambda: len(times) == 2)
    assert times[0] - began < 1.4, "the decorator's delay is that of the retry"
    assert times[1] - times[0] >= 1.49


async def test_several_queues(rabbit, queue_name):
    broker = rabbit(f"{queue_name}-a", f"{queue_name}-b")
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        for name, count in ((f"{queue_name}-a", 1), (f"{queue_name}-b", 2)):
            for _ in range(count):
                sent = await task.kicker().with_labels(delay=0.3, queue_name=name).kiq(0)
                assert (await broker.delay.queue.get(sent.task_id)).meta["queue"] == name
        assert len(await messages(f"{queue_name}-a", 1)) == 1
        assert len(await messages(f"{queue_name}-b", 2)) == 2


async def test_brokers_of_other_queues_have_other_delays(rabbit, queue_name):
    names = {rabbit(f"{queue_name}-{q}").delay.name for q in "ab"} | {rabbit().delay.name}
    assert len(names) == 3
    assert rabbit().delay.name == f"delayadapters:taskiq:rabbitmq:/:{queue_name}:{queue_name}"


async def test_priority_and_persistence(rabbit, queue_name):
    broker = rabbit()
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        await task.kicker().with_labels(priority=7).with_task_id("id-1").kiq(1)
        await task.kicker().with_labels(priority=7, delay=0.05).with_task_id("id-1").kiq(1)
        native, released = await messages(queue_name, 2)
    assert (native.body, native.headers, native.priority, native.delivery_mode) == (
        released.body,
        released.headers,
        released.priority,
        released.delivery_mode,
    )
    assert "delay" not in released.headers


async def test_not_started(rabbit):
    broker = rabbit()
    task = add_task(broker)
    with pytest.raises(SendTaskError) as caught:
        await task.kicker().with_labels(delay=5).kiq(0)
    assert isinstance(caught.value.__cause__, BrokerNotStarted)
    assert "AioPikaBroker was not started" in str(caught.value.__cause__)
    assert (await broker.delay.queue.stats()).waiting == 0


async def test_a_rabbitmq_that_is_away_is_waited_for(rabbit, queue_name, make_proxy):
    """Its connection is cut while tasks are released: nobody's attempts are burnt, and nothing is lost."""
    parts = urlsplit(URL)
    proxy = make_proxy(parts.port or 5672, socket.gethostbyname(parts.hostname))
    url = parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}").geturl()
    broker = rabbit(url=url, reconnect_interval=0.3)
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        ids = [(await task.kicker().with_labels(delay=0.3 + n / 1000).kiq(n)).task_id for n in range(20)]
        proxy.down()
        await wait_until_async(lambda: broker.delay.releaser_stats.pauses >= 1, timeout=30)
        assert all(job.attempts == 0 for job in (await broker.delay.queue.jobs()).jobs)
        proxy.resume()

        async def all_gone():
            stats = await broker.delay.queue.stats()
            return stats.waiting + stats.leased == 0

        await wait_until_async(all_gone, timeout=40)
        assert (broker.delay.releaser_stats.failed, broker.delay.releaser_stats.dead) == (0, 0)
        found = await messages(queue_name, 20, distinct=True)  # what was under way may be there twice
    assert {message.headers["task_id"] for message in found} == set(ids)


async def test_the_loop_starts_after_the_broker_is_connected(rabbit):
    """What is due at start would otherwise be refused, or lost."""
    broker = rabbit()
    task = add_task(broker)
    async with started(broker):
        sent = await task.kicker().with_labels(delay=0.01).kiq(time.time())
    again = rabbit()
    add_task(again)
    async with working(again):
        assert (await sent.wait_result(0.01, 30)).return_value > 0
        assert again.delay.releaser_stats.pauses == again.delay.releaser_stats.failed == 0
