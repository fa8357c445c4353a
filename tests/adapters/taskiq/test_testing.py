"""delayadapters.testing for taskiq: no Redis, no worker. Brokers in Redis have an address where nobody listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from taskiq import InMemoryBroker, SimpleRetryMiddleware, SmartRetryMiddleware
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from delayadapters import Outcome
from delayadapters.taskiq import DelayMiddleware, DelayScheduleSource, TaskCancelled
from delayadapters.testing import ClockMismatch, ReleaseFailed
from delayadapters.testing.taskiq import DelayedTaskiq
from delaytests.docs import run_example

pytest_plugins = ["pytester"]
NOBODY = "redis://localhost:1/0"
Make = Callable[..., DelayedTaskiq]


@pytest.fixture(autouse=True)
def _no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a connection is being made: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", refuse)


def with_tasks(broker: Any) -> Any:
    broker.ran = ran = []

    @broker.task(task_name="proj:note")
    async def note(value: Any = None, *, urgent: bool = False) -> Any:
        ran.append(value)
        return value

    @broker.task(task_name="proj:plain")
    def plain(value: Any) -> None:
        ran.append(value)

    @broker.task(task_name="proj:flaky", retry_on_error=True, max_retries=3)
    async def flaky() -> None:
        ran.append("flaky")
        raise ValueError("for good")

    @broker.task(task_name="proj:tick")
    async def tick() -> None:
        ran.append("tick")
        await tick.kicker().with_labels(delay=10).kiq()
        ran.append((await (await note.kiq("inside")).wait_result(check_interval=0.01, timeout=5)).return_value)

    @broker.task(task_name="proj:waits")
    async def waits() -> None:
        task = await note.kicker().with_labels(delay=10).kiq(1)
        await task.wait_result(check_interval=0.01)

    broker.note, broker.plain, broker.flaky, broker.tick, broker.waits = note, plain, flaky, tick, waits
    return broker


@pytest.fixture(params=["memory", "memory, in place", "memory, with the middleware", "redis", "redis, without"])
def broker(request: pytest.FixtureRequest) -> Any:
    if request.param.startswith("memory"):
        made: Any = InMemoryBroker(await_inplace="place" in request.param)
    else:
        made = ListQueueBroker(NOBODY).with_result_backend(RedisAsyncResultBackend(NOBODY))
    made.add_middlewares(SmartRetryMiddleware(default_delay=10))
    if request.param in ("redis", "memory, with the middleware"):
        made.add_middlewares(DelayMiddleware(NOBODY))
    return with_tasks(made)


@pytest.fixture
def delayed(delayed_taskiq: Make, broker: Any) -> DelayedTaskiq:
    return delayed_taskiq(broker)


async def later(task: Any, *args: Any, delay: Any = 60, **kwargs: Any) -> Any:
    return await task.kicker().with_labels(delay=delay).kiq(*args, **kwargs)


async def test_a_delayed_task_waits_and_runs_when_the_clock_gets_there(delayed: DelayedTaskiq, broker: Any) -> None:
    task = await later(broker.note, "a", urgent=True)
    delayed.assert_scheduled(broker.note, delay=60, args=["a"], kwargs={"urgent": True}, id=task.task_id, times=1)
    delayed.assert_scheduled("note", delay=timedelta(minutes=1))
    assert await delayed.advance(59.999) == []
    assert broker.ran == []
    assert [job.task for job in await delayed.advance(1)] == ["proj:note"]
    assert broker.ran == ["a"]
    assert (await task.wait_result(timeout=1)).return_value == "a"
    delayed.assert_nothing_scheduled()
    delayed.assert_released("note", delay=60)


async def test_what_is_not_delayed_runs_on_the_same_event_loop(delayed: DelayedTaskiq, broker: Any) -> None:
    task = await broker.note.kiq(1)
    assert (await task.wait_result(timeout=5)).return_value == 1
    await broker.plain.kiq(2)
    await delayed.advance(0)
    assert broker.ran == [1, 2]
    assert delayed.released == []


async def test_what_a_task_schedules_inside_the_window_is_released_too(delayed: DelayedTaskiq, broker: Any) -> None:
    if getattr(broker, "await_inplace", False):
        pytest.skip("such a broker runs a task inside the call that sends it")
    await later(broker.tick, delay=10)
    await delayed.advance(25)
    assert broker.ran == ["tick", "inside", "inside"] * 2
    delayed.assert_scheduled("tick", due_in=5)


async def test_retries_wait_and_the_last_error_is_raised(delayed: DelayedTaskiq, broker: Any) -> None:
    task = await broker.flaky.kiq()
    await delayed.advance(0)
    delayed.assert_scheduled("flaky", delay=10, id=task.task_id, times=1)
    await delayed.advance_to_next()
    delayed.assert_scheduled("flaky", delay=10, id=task.task_id)
    with pytest.raises(ValueError, match="for good"):
        await delayed.advance(3600)
    assert broker.ran == ["flaky"] * 3
    assert (await task.get_result()).is_err
    assert await delayed.advance_to_next() == []


async def test_cancelled_by_task_and_by_schedule(delayed: DelayedTaskiq, broker: Any) -> None:
    task = await later(broker.note, 1)
    assert await delayed.middleware.cancel(task) is Outcome.CANCELLED
    assert isinstance((await task.get_result()).error, TaskCancelled)
    source = DelayScheduleSource(broker)
    schedule = await broker.note.schedule_by_time(source, delayed.clock.now() + timedelta(hours=1), 2)
    delayed.assert_scheduled("note", delay=3600, args=[2])
    await schedule.unschedule()
    delayed.assert_nothing_scheduled()
    await delayed.advance(3600)
    assert broker.ran == []


async def test_retries_through_a_schedule_source_are_on_the_clock_too(delayed_taskiq: Make) -> None:
    broker = InMemoryBroker().with_middlewares(DelayMiddleware(NOBODY))
    source = DelayScheduleSource(broker)
    broker.add_middlewares(SmartRetryMiddleware(default_delay=30, schedule_source=source))
    delayed = delayed_taskiq(with_tasks(broker))
    await delayed.advance(86_400)
    await broker.flaky.kiq()
    await delayed.advance(0)
    delayed.assert_scheduled("flaky", delay=pytest.approx(30, abs=10))


async def test_results_that_are_kept_between_retries_are_no_failures(delayed_taskiq: Make) -> None:
    broker = with_tasks(InMemoryBroker().with_middlewares(SimpleRetryMiddleware(no_result_on_retry=False)))
    broker.add_middlewares(SmartRetryMiddleware(default_delay=10, no_result_on_retry=False))
    broker.middlewares.pop(0)
    delayed = delayed_taskiq(broker)
    await broker.flaky.kiq()
    await delayed.advance(19)
    delayed.assert_scheduled("flaky")
    with pytest.raises(ValueError, match="for good"):
        await delayed.advance(1)


async def test_errors_can_be_left_in_the_results(delayed_taskiq: Make) -> None:
    broker = with_tasks(InMemoryBroker())
    delayed = delayed_taskiq(broker, propagate=False)
    task = await later(broker.flaky, delay=5)
    await delayed.advance(5)
    assert (await task.get_result()).is_err


async def test_a_task_that_waits_for_one_that_is_not_due_is_found_out(delayed_taskiq: Make) -> None:
    broker = with_tasks(InMemoryBroker())
    delayed = delayed_taskiq(broker, patience=0.1)
    await broker.waits.kiq()
    with pytest.raises(TimeoutError, match=r"1 tasks still run after patience=0.1 s"):
        await delayed.advance(60)
    for task in list(broker._running_tasks):
        task.cancel()


async def test_a_label_of_an_absolute_time(delayed: DelayedTaskiq, broker: Any) -> None:
    await broker.note.kicker().with_labels(delay_until=delayed.clock.now() + timedelta(hours=1)).kiq(1)
    delayed.assert_scheduled("note", delay=3600)
    await delayed.advance(86_400)
    with pytest.warns(ClockMismatch, match="proj:note was scheduled for"):
        await broker.note.kicker().with_labels(delay_until=datetime.now(timezone.utc) + timedelta(hours=1)).kiq(1)


async def test_a_task_of_another_service_is_released_and_runs_nowhere(delayed_taskiq: Make) -> None:
    from taskiq.kicker import AsyncKicker

    broker = with_tasks(ListQueueBroker(NOBODY, queue_name="billing"))
    delayed = delayed_taskiq(broker)
    await AsyncKicker("charge", broker, {"delay": 5}).kiq(7)
    delayed.assert_scheduled("charge", queue="billing")
    await delayed.advance(5)
    delayed.assert_released("charge", args=[7])


async def test_published_through_the_brokers_own_kick(delayed_taskiq: Make) -> None:
    class Broker(InMemoryBroker):
        async def kick(self, message: Any) -> None:
            kicked.append((message.task_name, message.task_id, message.labels))
            if message.task_name == "proj:plain":
                raise OSError("no broker")

    kicked: list[Any] = []
    broker = with_tasks(Broker())
    delayed = delayed_taskiq(broker, release="publish")
    task = await broker.note.kicker().with_labels(delay=60, color="red").kiq(1)
    await delayed.advance(59)
    assert kicked == []
    await delayed.advance(1)
    assert kicked == [("proj:note", task.task_id, {"color": "red"})]
    await later(broker.plain, 7, delay=1)
    with pytest.raises(ReleaseFailed, match=r"proj:plain\(7\) \[id .*\] could not be released: OSError: no broker"):
        await delayed.advance(1)


def state_of(broker: Any) -> dict[str, Any]:
    state = {**vars(broker), "middlewares": list(broker.middlewares)}
    for middleware in broker.middlewares:
        if isinstance(middleware, DelayMiddleware):
            state |= {f"middleware.{name}": value for name, value in vars(middleware).items()}
    return state


async def test_the_broker_is_given_back_as_it_was(broker: Any) -> None:
    before = state_of(broker)
    for _ in range(2):
        with DelayedTaskiq(broker) as delayed:
            await later(broker.note, 1)
            delayed.assert_scheduled(times=1)
            with pytest.raises(RuntimeError, match="in memory already"):
                DelayedTaskiq(broker)
    after = state_of(broker)
    assert set(before) == set(after)
    assert {name for name in before if before[name] is not after[name] and before[name] != after[name]} == set()


async def test_a_broker_may_be_started_and_shut_down_meanwhile(delayed_taskiq: Make) -> None:
    broker = with_tasks(InMemoryBroker().with_middlewares(DelayMiddleware(NOBODY)))
    delayed = delayed_taskiq(broker)
    await broker.startup()
    await later(broker.note, 1)
    await delayed.advance(60)
    assert broker.ran == [1]
    await broker.shutdown()


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes a taskiq broker, got 7"):
        DelayedTaskiq(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='release must be "run" or "publish", got None'):
        DelayedTaskiq(InMemoryBroker(), release=None)  # type: ignore[arg-type]


def test_the_plugin_undoes_it_at_the_end_of_a_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from taskiq import InMemoryBroker

        broker = InMemoryBroker()

        @broker.task(task_name="remind")
        async def remind(what): ...

        async def test_first(delayed_taskiq, delay_clock):
            delayed = delayed_taskiq(broker)
            await remind.kicker().with_labels(delay=60).kiq("a")
            assert delayed.clock is delay_clock
            delayed.assert_scheduled("remind", delay=60)

        async def test_fails(delayed_taskiq):
            delayed = delayed_taskiq(broker)
            await remind.kicker().with_labels(delay=60).kiq("a")
            delayed.assert_scheduled("remind", delay=61)

        def test_last():
            assert broker.middlewares == [] and "kick" not in vars(broker)
    """)
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function", "--asyncio-mode=auto")
    done = pytester.runpytest_inprocess(*options)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["E*expected to be scheduled: remind with delay=61", "E*in 60 s: remind('a')*"])


def test_the_test_file_in_the_docs_passes(pytester: pytest.Pytester) -> None:
    run_example(pytester, "taskiq")
