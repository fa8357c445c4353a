"""What a worker does with a task does not change because the task was delayed: acks, limits, results, expiry."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chord
from celery.contrib.testing.worker import start_worker
from celery.exceptions import ChordError, TaskRevokedError
from kombu import Exchange, Queue

from delayadapters import Outcome
from delayadapters.celery.fixup import installed
from delayadapters.celery.message import DUE_HEADER
from delaytests import RedisServer, wait_until

LATER = 0.3


def due(execution: Any) -> float:
    return datetime.fromisoformat(execution.headers[DUE_HEADER]).timestamp()


def get(result: Any, timeout: float = 60) -> Any:
    return result.get(timeout=timeout, disable_sync_subtasks=False)


def define(app: Celery, function: Callable[..., Any], **options: Any) -> Any:
    return app.task(function, bind=True, shared=False, name=f"native.{function.__name__}", **options)


def nothing(self: Any) -> None:
    """A task."""


@pytest.fixture
def here(make_app: Callable[..., Celery]) -> Iterator[Callable[..., Any]]:
    """``here(app)``: a worker for the app, in a thread of this process, until the test ends."""
    contexts: list[Any] = []

    def start(app: Celery) -> Any:
        app.conf.update(worker_hijack_root_logger=False, worker_redirect_stdouts=False)
        contexts.append(start_worker(app, perform_ping_check=False, shutdown_timeout=30))
        return contexts[-1].__enter__()

    yield start
    for context in reversed(contexts):
        context.__exit__(None, None, None)


@pytest.fixture
def app(redis_broker: Any, make_app: Callable[..., Celery]) -> Celery:
    return make_app({**redis_broker.conf, "delayadapters_min_delay": 0.05})


# ------------------------------------------------------------------------------------------ one worker, in this process


def test_acks_limits_and_results(app: Celery, redis_broker: Any, here: Callable[..., Any]) -> None:
    client, results = redis_broker.redis.client(), redis_broker.redis.client(db=9)
    app.conf.result_expires = 77
    times: list[float] = []

    def unacked(self: Any) -> int:
        """How many messages the broker would deliver again."""
        return int(client.hlen("unacked"))

    def seldom(self: Any) -> None:
        times.append(time.monotonic())

    early, late = define(app, unacked), app.task(unacked, bind=True, shared=False, name="native.late", acks_late=True)
    limited = define(app, seldom, rate_limit="2/s")
    silent = define(app, nothing, ignore_result=True)
    here(app)

    assert get(early.apply_async(countdown=LATER)) == get(early.delay())
    assert get(late.apply_async(countdown=LATER)) == get(late.delay()) == 1, "acknowledged when it has run"
    wait_until(lambda: client.hlen("unacked") == 0)

    kept = early.apply_async(countdown=LATER)
    get(kept)
    assert 0 < results.ttl(f"celery-task-meta-{kept.id}") <= 77
    ignored = silent.apply_async(countdown=LATER)
    ignored_once = early.apply_async(countdown=LATER, ignore_result=True)
    ran = [limited.apply_async(countdown=LATER) for _ in range(4)]
    wait_until(lambda: len(times) == 4, 60)
    for result in ran:
        get(result)
    assert times[-1] - times[0] >= 3 * 0.5 - 0.1, "two a second, and all were due together"
    assert not results.exists(f"celery-task-meta-{ignored.id}")
    assert not results.exists(f"celery-task-meta-{ignored_once.id}")
    assert app.delayadapters.stats().waiting == 0


def test_what_expires_while_it_waits_is_revoked_and_fails_its_chord(
    app: Celery, redis_broker: Any, here: Callable[..., Any]
) -> None:
    ran: list[Any] = []

    def add(self: Any, a: int) -> int:
        ran.append(a)
        return a

    def total(self: Any, numbers: list[int]) -> int:
        return sum(numbers)

    add_task, total_task = define(app, add), define(app, total)
    here(app)
    lost = add_task.apply_async((1,), countdown=LATER + 0.3, expires=LATER)
    at = datetime.now(timezone.utc) + timedelta(seconds=LATER)
    absolute = add_task.apply_async((2,), countdown=LATER + 0.3, expires=at)
    kept = add_task.apply_async((3,), countdown=LATER, expires=60)
    members = [add_task.s(4), add_task.s(5).set(countdown=LATER + 0.3, expires=LATER)]
    whole = chord(members, total_task.s()).apply_async()
    assert get(kept) == 3
    for result in (lost, absolute):
        with pytest.raises(TaskRevokedError, match="expired"):
            get(result)
        assert result.state == "REVOKED"
    with pytest.raises((ChordError, TaskRevokedError)):  # the chord's own, or that of the member found first
        get(whole)
    wait_until(lambda: whole.state == "FAILURE")
    assert sorted(ran) == [3, 4]


def test_a_year_ahead_is_in_redis_and_in_no_worker(app: Celery, redis_broker: Any, here: Callable[..., Any]) -> None:
    note = define(app, nothing)
    here(app)
    result = note.apply_async(eta=datetime.now(timezone.utc) + timedelta(days=365))
    soon = note.apply_async(countdown=LATER)
    get(soon)  # by now the worker has had all there is
    job = app.delayadapters.get(result.id)
    assert job.due_at > datetime.now(timezone.utc) + timedelta(days=364)
    assert redis_broker.size() == 0
    inspect = app.control.inspect(timeout=20, limit=1)  # does not wait for more answers than one
    [scheduled], [reserved] = inspect.scheduled().values(), inspect.reserved().values()
    assert scheduled == reserved == []
    result.revoke()


# --------------------------------------------------------------------------------------------------------------- retry


def failing(app: Celery, running: list[Any], down: Callable[[], None]) -> Any:
    """A task that asks to be retried, when the delay Redis has just gone."""

    def again(self: Any) -> str:
        running.append(self.request.retries)
        if self.request.retries == 0:
            down()
            raise self.retry(countdown=0.5, exc=ValueError("first"))
        return "second"

    return define(app, again)


@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize("mode", ["raise", "native"])
def test_retry_when_the_delay_redis_is_down(
    request: pytest.FixtureRequest,
    redis_broker: Any,
    make_app: Callable[..., Celery],
    here: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    how: str,
) -> None:
    """Tried again for a bounded time; then Celery rejects the message, or the retry goes to Celery's own countdown."""
    monkeypatch.setattr("delayadapters.celery.settings.SCHEDULE_TIMEOUT", 2.0)
    running: list[Any] = []
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("delayadapters.celery.fixup")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # the worker here shows errors only
    request.addfinalizer(lambda: (logger.removeHandler(handler), logger.setLevel(logging.NOTSET)))
    with RedisServer() as waiting:
        conf = {"delayadapters_redis_url": waiting.url, "delayadapters_on_unavailable": mode}
        app = make_app({**redis_broker.conf, **conf, "delayadapters_min_delay": 0.05})
        task = failing(app, running, getattr(waiting, how))
        here(app)
        begin = time.monotonic()
        result = task.delay()
        if mode == "native":
            assert get(result) == "second"
            assert running == [0, 1]
            assert installed(app).fallbacks == 1
            assert [f"native.again[{result.id}] goes to Celery's own countdown" in line for line in warned] == [True]
        else:
            with pytest.raises(Exception, match=r"Redis|unavailable|answer"):
                get(result)
            assert running == [0]
            assert result.state == "FAILURE"
        assert time.monotonic() - begin < 60, "the caller hears within a bounded time"
        if how == "pause":
            waiting.resume()


def test_retry_tries_the_delay_redis_again_before_it_gives_up(
    redis_broker: Any, make_app: Callable[..., Celery], here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that is away for a moment loses no retry."""
    running: list[Any] = []
    with RedisServer(aof="always") as waiting:
        app = make_app({**redis_broker.conf, "delayadapters_redis_url": waiting.url, "delayadapters_min_delay": 0.05})

        def away() -> None:
            waiting.pause()
            threading.Timer(1.0, waiting.resume).start()

        task = failing(app, running, away)
        here(app)
        assert get(task.delay()) == "second"
    assert running == [0, 1]


# ------------------------------------------------------------------------------------------------------------ RabbitMQ


def test_quorum_queues_take_half_a_second_and_rpc_results_come_back(
    rabbit_broker: Any, make_app: Callable[..., Celery], here: Callable[..., Any]
) -> None:
    """Native delayed delivery cannot do half a second: it raises. And the reply queue is the caller's, as natively."""
    exchange = Exchange(f"{rabbit_broker.queue}-exchange", type="topic")
    quorum = Queue(rabbit_broker.queue, exchange, routing_key="#", queue_arguments={"x-queue-type": "quorum"})
    conf = {
        **rabbit_broker.conf,
        "task_queues": [quorum],
        "task_default_exchange": exchange.name,
        "task_default_exchange_type": "topic",
        "result_backend": "rpc://",
        "broker_native_delayed_delivery_queue_type": "classic",
    }
    native, app = make_app(conf, installed=False), make_app(conf)

    def double(self: Any, n: int) -> int:
        assert self.request.headers[DUE_HEADER]
        return 2 * n

    with pytest.raises(ValueError, match="positive"):
        native.send_task("native.double", (1,), countdown=0.5)
    task = define(app, double)
    here(app)
    results = [task.apply_async((n,), countdown=wait) for n, wait in ((1, 0.5), (2, 1.3), (3, 0.9))]
    assert [get(result) for result in results] == [2, 4, 6]
    assert app.delayadapters.stats().waiting == 0


# --------------------------------------------------------------------------------------------------- workers that die


def test_a_lost_worker(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    """``retry_on_worker_lost`` retries from the worker's main process; ``reject_on_worker_lost`` hands it out again."""
    conf = redis_broker.conf | {"delayadapters_min_delay": 0.1}
    app = make_app(conf)
    worker(conf)
    retried, rejected = (app.tasks[name].apply_async(countdown=0.5) for name in ("dies_retried", "dies_rejected"))

    def runs_of(result: Any) -> list[Any]:
        return sorted((run for run in executions() if run.id == result.id), key=lambda run: run.at)

    # When two children die at once, Celery may hand the rejected one out once more, as it does without any delay.
    wait_until(lambda: min(len(runs_of(one)) for one in (retried, rejected)) >= 2, 60, message="two runs of each")
    first, second = runs_of(retried)[:2]
    assert (first.retries, second.retries) == (0, 1)
    assert second.at >= due(second) > due(first), "the retry waited with us, too"
    assert first.pid != second.pid
    first, second = runs_of(rejected)[:2]
    assert (first.retries, second.retries) == (0, 0)
    assert due(second) == due(first), "the same message"
    wait_until(lambda: retried.state == rejected.state == "SUCCESS")


@pytest.mark.slow
def test_the_visibility_timeout_hands_out_nothing_of_ours(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    """Much shorter than the delay, with two workers. Beside it the same by Celery itself, which runs several times."""
    options = {"visibility_timeout": 1, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    conf = redis_broker.conf | {"broker_transport_options": options}
    app = make_app(conf)
    for _ in range(2):
        worker(conf)
    ours = app.tasks["note"].apply_async(("ours",), countdown=4)
    native = Celery.send_task(app, "note", ("native",), countdown=4)

    def count() -> Counter[str]:
        return Counter(run.id for run in executions())

    wait_until(lambda: count()[ours.id] and count()[native.id] >= 2, 30)
    assert count()[ours.id] == 1
    [run] = [run for run in executions() if run.id == ours.id]
    assert run.at >= due(run)


@pytest.mark.slow
def test_one_of_two_workers_is_killed_while_500_wait(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    """Whichever of them watched the queue: nothing that waits is in a worker, so the other one runs it all."""
    conf = redis_broker.conf
    app = make_app(conf)
    first, _second = worker(conf), worker(conf)
    ids = {app.tasks["note"].apply_async((n,), countdown=60 + n % 10 / 10).id for n in range(500)}
    first.kill_tree()
    wait_until(lambda: not first.tree)
    # Due only now: what a worker has taken from the broker when it is killed is Celery's to bring back.
    assert set(app.delayadapters.reschedule_many(ids, delay=1)) == {Outcome.RESCHEDULED}
    wait_until(lambda: len(executions()) >= 500, 60)
    runs = executions()
    assert Counter(run.id for run in runs) == Counter(dict.fromkeys(ids, 1))
    assert all(run.at >= due(run) for run in runs)
