"""Where the release loop runs: workers, the scheduler, a process of its own, clients that ask for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import redis.asyncio
from taskiq import TaskiqEvents
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, PubSubBroker, RedisStreamBroker

from delaytests import wait_until, wait_until_async
from delaytests.taskiqs import started, working


def add_task(broker):
    @broker.task(task_name="note")
    async def note(n, due=0.0):
        return time.time() - due

    return note


def loops(client, name):
    """The release loops that queue has heard of."""
    return [about.split()[-1] for about in client.hgetall(f"{{{name}:0}}:loops").values()]


async def test_a_client_runs_no_loop_unless_asked(make_broker, client, queue_name):
    for ask in (False, True):
        broker = make_broker(delay={"embed_in_client": ask})
        task = add_task(broker)
        async with started(broker):
            assert (broker.delay.releaser_stats is not None) is ask
            await task.kicker().with_labels(delay=0.01).kiq(1)
            if ask:
                await wait_until_async(lambda: client.llen(queue_name) == 2)


async def test_embed_off(make_broker):
    broker = make_broker(delay={"embed": False})
    add_task(broker)
    async with working(broker):
        assert broker.delay.releaser_stats is None


async def test_a_client_that_begins_to_work_releases(make_broker):
    """run_receiver_task in a process whose broker was started as a client's (its default is run_startup=False)."""
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        assert broker.delay.releaser_stats is None
        receiver = asyncio.create_task(run_receiver_task(broker))
        sent = await task.kicker().with_labels(delay=0.1).kiq(1)
        assert not (await sent.wait_result(0.01, 30)).is_err
        receiver.cancel()
        await asyncio.wait([receiver])
    assert broker.delay.releaser_stats is None


async def test_nothing_is_released_before_the_broker_is_up(make_broker, client, queue_name):
    """A stream's consumer group is made at the end of startup, and sees nothing older."""
    first = make_broker(RedisStreamBroker)
    task = add_task(first)
    sent = await task.kicker().with_labels(delay=0.01).kiq(time.time())
    await asyncio.sleep(0.05)
    broker = make_broker(RedisStreamBroker)
    add_task(broker)

    async def slow(_state):
        await asyncio.sleep(0.3)
        assert not client.exists(queue_name)

    broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, slow)
    async with working(broker):
        assert (await sent.wait_result(0.01, 30)).return_value > 0.2


async def test_a_broker_that_does_not_start_starts_no_loop(make_broker, server):
    broker = make_broker()

    async def refuse(_state):
        raise ConnectionError("no")

    broker.add_event_handler(TaskiqEvents.CLIENT_STARTUP, refuse)
    broker.delay.release_here = True
    with pytest.raises(ConnectionError):
        await broker.startup()
    assert broker.delay.releaser_stats is None
    await broker.shutdown()


async def test_start_and_stop_again_and_again(make_broker, client, queue_name):
    broker = make_broker()
    task = add_task(broker)
    for _ in range(3):
        async with working(broker):
            sent = await task.kicker().with_labels(delay=0.02).kiq(1)
            assert not (await sent.wait_result(0.01, 30)).is_err
    assert client.hgetall(f"{{{broker.delay.name}:0}}:loops") == {}, "a loop that stops strikes itself off"


async def test_shutdown_hands_the_watch_over_at_once(make_broker, client):
    first, second = make_broker(), make_broker()
    task = add_task(first)
    add_task(second)
    watch = f"{{{first.delay.name}:0}}:watch"
    async with contextlib.AsyncExitStack() as stack:
        async with working(first):
            await task.kicker().with_labels(delay=60).kiq(1)
            held = await wait_until_async(lambda: client.get(watch))
            await stack.enter_async_context(working(second))
        assert client.get(watch) != held, "its watch would be good for 2 s more"
        sent = await task.kicker().with_labels(delay=0.2).kiq(1, time.time() + 0.2)
        assert (await sent.wait_result(0.01, 20)).return_value > -0.001


def test_one_middleware_in_several_event_loops(make_broker):
    broker = make_broker()
    task = add_task(broker)
    for _ in range(3):

        async def send():
            await task.kicker().with_labels(delay=60).kiq(1)
            await broker.connection_pool.disconnect()

        asyncio.run(send())
    waiting = asyncio.run(_waiting(broker))
    assert waiting == 3


async def _waiting(broker):
    return (await broker.delay.queue.stats()).waiting


# ------------------------------------------------------------------------------------------------ real processes


@pytest.fixture
def send(app, server, queue_name):
    """``send(task, *args, **labels)``: as a client of the application in delay_taskiq_app.py; the task's id."""
    from delayadapters.taskiq import DelayMiddleware

    def run(name, *args, broker=ListQueueBroker, task_id=None, **labels):
        async def go():
            made = broker(server.url, queue_name=queue_name, socket_timeout=None)
            made.with_middlewares(DelayMiddleware(server.url, timeout=60))

            @made.task(task_name=name)
            def stub(*_): ...

            task = await stub.kicker().with_labels(**labels).with_task_id(task_id).kiq(*args)
            await made.shutdown()
            return task.task_id

        return asyncio.run(go())

    return run


def ran(client):
    return [line.decode().split() for line in client.lrange("ran", 0, -1)]


def test_an_idle_worker_and_a_stop(app, client, send, server, queue_name):
    """redis-py 8's socket time-out of 5 s ends an idle ListQueueBroker, unless it is told not to; not our loop. Both
    kinds idle here until the one has died; then a delayed task is on time with the other."""
    worker = app.start("worker", "delay_taskiq_app:broker", "--workers", "1")
    dying = app.start("worker", "delay_taskiq_app:broker", "--workers", "1", SOCKET_TIMEOUT="default", QUEUE="other")
    app.wait_for(worker, "Listening started")
    app.wait_for(dying, "TimeoutError")
    app.kill(dying)
    time.sleep(2)
    send("note", 1, time.time() + 0.3, delay=0.3)
    wait_until(lambda: len(ran(client)) == 1)
    assert -0.001 < float(ran(client)[0][1]) < 4, "on time, on a machine however busy"
    app.stop(worker)
    assert "cannot be completed" not in app.log(worker)
    assert loops(client, f"delayadapters:taskiq:list:0:{queue_name}") == []


IDLE = float(os.environ.get("DELAY_TEST_IDLE", "60" if "CI" in os.environ else "8"))
"""Seconds: longer than redis-py 8's own time-out of 5. The minute that was promised with CI or DELAY_TEST_IDLE=60."""


@pytest.mark.slow
@pytest.mark.timeout(IDLE + 120)
async def test_idle_brokers_then_a_delayed_task(make_broker, queue_name):
    """Nothing happens at all, then a task is due: every Redis broker gets it, without a reconnection."""
    brokers = {
        cls.__name__: make_broker(cls, queue_name=f"{queue_name}-{cls.__name__}")
        for cls in (ListQueueBroker, RedisStreamBroker, PubSubBroker)
    }
    async with contextlib.AsyncExitStack() as stack:
        tasks = {name: add_task(broker) for name, broker in brokers.items()}
        for broker in brokers.values():
            await stack.enter_async_context(working(broker))
        await asyncio.sleep(IDLE)
        for name, broker in brokers.items():
            sent = await tasks[name].kicker().with_labels(delay=0.3).kiq(1, time.time() + 0.3)
            late = (await sent.wait_result(0.005, 20)).return_value
            assert -0.001 < late < 4, f"{name}: on time, on a machine however busy"
            assert broker.delay.releaser_stats.faults == 0


def test_the_scheduler_process_releases(app, client, send, queue_name):
    scheduler = app.start("scheduler", "delay_taskiq_app:scheduler")
    app.wait_for(scheduler, "Startup completed")
    send("note", 1, 0, delay=0.2)
    wait_until(lambda: client.llen(queue_name) == 1)


def test_the_command(app, client, send, queue_name):
    process = app.start("delay-release", "delay_taskiq_app:broker", EMBED="0")
    app.wait_for(process, "delay release: queue")
    send("note", 1, 0, delay=0.2)
    wait_until(lambda: client.llen(queue_name) == 1)
    app.stop(process)
    assert process.returncode == 0
    assert "delay release: stopped" in app.log(process)
    assert loops(client, f"delayadapters:taskiq:list:0:{queue_name}") == []


@pytest.fixture
def command(make_broker):
    """``command(broker)``: the command's own coroutine, as a task; it handles the signals of this process."""
    from delayadapters.taskiq.command import release

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    running = []

    def run(broker):
        running.append(asyncio.create_task(release(broker, broker.delay, 5.0)))
        return running[-1]

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
    assert all(task.done() for task in running)


async def handled(number):
    """A signal that nobody handles would end the tests."""
    await wait_until_async(lambda: signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler))


both = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


@both
async def test_the_command_ends_by_a_signal(make_broker, command, client, number):
    broker = make_broker()
    running = command(broker)
    await wait_until_async(lambda: broker.delay.releaser_stats is not None)
    await handled(number)
    signal.raise_signal(number)
    assert await asyncio.wait_for(running, 20) == 0
    assert loops(client, broker.delay.name) == []


@both
async def test_the_command_ends_by_a_signal_while_its_broker_is_still_starting(make_broker, command, number):
    """aio-pika, for one, tries for as long as it takes."""
    broker = make_broker()
    begun = asyncio.Event()

    async def never(_state):
        begun.set()
        await asyncio.sleep(600)

    broker.add_event_handler(TaskiqEvents.CLIENT_STARTUP, never)
    running = command(broker)
    await asyncio.wait_for(begun.wait(), 10)
    await handled(number)
    signal.raise_signal(number)
    assert await asyncio.wait_for(running, 20) == 0
    assert broker.delay.releaser_stats is None


async def test_the_command_ends_when_its_loop_does(make_broker, command, monkeypatch, caplog):
    """A process that releases nothing must not look alive to its supervisor."""
    from delayadapters.release.loop import ReleaseLoop

    broker = make_broker()
    running = command(broker)
    await wait_until_async(lambda: broker.delay.releaser_stats is not None)

    def broken(self, now):
        raise ArithmeticError("a fault of ours")

    monkeypatch.setattr(ReleaseLoop, "next", broken)
    caplog.set_level("INFO")
    assert await asyncio.wait_for(running, 20) == 1
    assert "a fault of ours" in caplog.text
    assert "delay release: ended by itself" in caplog.text
    gc.collect()  # asyncio's word about the same fault


async def test_the_command_and_a_broker_that_cannot_start(make_broker, command, caplog):
    broker = make_broker()

    async def refuse(_state):
        raise ConnectionError("nobody there")

    broker.add_event_handler(TaskiqEvents.CLIENT_STARTUP, refuse)
    assert await asyncio.wait_for(command(broker), 20) == 1
    assert "the broker could not be started: ConnectionError: nobody there" in caplog.text


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("nowhere:broker", "cannot import 'nowhere:broker'"),
        ("brokers_of_a_test", "cannot import 'brokers_of_a_test'"),
        ("brokers_of_a_test:nothing", "cannot import 'brokers_of_a_test:nothing'"),
        ("brokers_of_a_test:number", "is no taskiq broker but 5"),
        ("brokers_of_a_test:memory", "InMemoryBroker runs its tasks in its own"),
        ("brokers_of_a_test:plain", "ListQueueBroker has no DelayMiddleware"),
        ("brokers_of_a_test:make_plain", "ListQueueBroker has no DelayMiddleware"),
    ],
)
def test_the_commands_complaints(tmp_path, monkeypatch, capsys, argument, complaint):
    from delayadapters.taskiq.command import DelayReleaseCMD

    (tmp_path / "brokers_of_a_test.py").write_text(
        "from taskiq import InMemoryBroker\nfrom taskiq_redis import ListQueueBroker\nnumber = 5\n"
        "memory = InMemoryBroker()\nplain = ListQueueBroker('redis://localhost')\n"
        "def make_plain():\n    return plain\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert DelayReleaseCMD().exec([argument, "--no-configure-logging"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_every_taskiq_call_stays_light():
    """taskiq imports the module of every entry point, and catches nothing but ImportError."""
    code = (
        "import sys, taskiq.abc.cmd; before = set(sys.modules); import delayadapters.taskiq.command;"
        "heavy = ('taskiq_redis', 'taskiq_aio_pika', 'aio_pika', 'asyncio.__main__', 'celery', 'arq');"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    shown = subprocess.run([sys.executable, "-m", "taskiq", "--help"], capture_output=True, text=True, check=True)
    assert "delay-release" in shown.stdout


async def test_a_loop_outlives_its_redis(make_broker, start_redis, queue_name):
    server = start_redis(aof="always")
    broker = make_broker(url=server.url, delay={"url": server.url})
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        await task.kicker().with_labels(delay=1.0).kiq(1)
        server.kill()
        await asyncio.sleep(0.3)
        server.restart()
        client = redis.asyncio.Redis.from_url(server.url)

        async def released():
            return await client.llen(queue_name) == 1

        await wait_until_async(released)
        await client.aclose()
