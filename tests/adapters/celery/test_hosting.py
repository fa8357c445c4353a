"""Where the release loop lives: it outlasts its process, its worker outlasts nobody; and forks share nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import logging.handlers
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from delayadapters import State
from delayadapters.celery.fixup import DelayFixup, installed
from delayadapters.celery.hosting import _let_go_of_inherited_files, run_releaser
from delaytests import wait_until

HERE = Path(__file__).parent
CELERY = str(Path(sys.executable).with_name("celery"))


def loops(app: Celery) -> list[int]:
    """The processes that release this app's tasks, as they told the queue."""
    return [int(loop.name.rpartition(":")[2]) for loop in app.delayadapters.loops()]


def the_loop(app: Celery, other_than: int | None = None) -> int:
    """The one process that releases, once there is one (another one than this)."""

    def alone() -> int | None:
        found = [pid for pid in loops(app) if pid != other_than]
        return found[0] if len(found) == 1 else None

    pid = wait_until(alone, 30, 0.05)
    assert pid is not None
    return pid


def held(app: Celery) -> dict[str, Any]:
    """What a release loop may hold: leases, the watch, its place in the list of loops."""
    queue = app.delayadapters
    watch = queue.client.exists("{" + queue.name + ":0}:watch")
    return {"leased": queue.stats().leased, "watch": watch, "loops": loops(app)}


NOTHING = {"leased": 0, "watch": 0, "loops": []}


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def numbers(runs: list[Any]) -> Counter[Any]:
    return Counter(run.args[0] for run in runs)


# ------------------------------------------------------------------------------------------------ it outlasts its death


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_release_process_is_started_again_and_goes_with_its_worker(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any],
    executions: Callable[[], list[Any]], pool: str,
) -> None:  # fmt: skip
    app = make_app(redis_broker.conf)
    running = worker(redis_broker.conf, pool)
    first = the_loop(app)
    app.tasks["note"].apply_async(("while it is dead",), countdown=1)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: executions(), 30, 0.05, message=running.log[-3000:])
    second = the_loop(app, other_than=first)
    assert second in running.tree
    assert f"release process (pid {first}) died" in running.log

    running.process.kill()  # the main process alone: nobody tells its children
    running.process.wait()
    wait_until(lambda: gone(second), 20, 0.02)
    app.delayadapters.close()


def test_in_a_solo_worker_it_is_a_thread(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any]
) -> None:
    app = make_app(redis_broker.conf)
    running = worker(redis_broker.conf, "solo")
    assert the_loop(app) == running.process.pid
    assert running.children() == set()
    assert running.stop() == 0
    assert held(app) == NOTHING


def test_pool_children_come_and_go_and_the_release_process_stays(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    app = make_app(redis_broker.conf)
    running = worker(redis_broker.conf, "prefork", "--max-tasks-per-child", "1", "--autoscale", "3,1")
    release = the_loop(app)
    for number in range(6):
        app.tasks["note"].apply_async((number,), countdown=1 + number / 10)
    wait_until(lambda: len(executions()) == 6, 40, 0.05, message=running.log[-3000:])
    runs = executions()
    assert len({run.pid for run in runs}) == 6, "a process each"
    assert numbers(runs) == Counter(range(6))
    assert loops(app) == [release]
    assert running.stop() == 0
    assert not running.tree
    assert held(app) == NOTHING


def test_a_worker_restarted_by_sighup_has_one_release_process(
    redis_broker: Any, make_app: Callable[..., Celery], celeryd: Callable[..., Any], out: Path,
    executions: Callable[[], list[Any]], tmp_path: Path,
) -> None:  # fmt: skip
    """It executes itself anew in the same process; what was forked before must be gone by then."""
    app = make_app(redis_broker.conf)
    # By its script: Celery repeats its command line, and "-m celery" is not one that it can repeat.
    running = celeryd(redis_broker.conf, "worker", "-c", "1", "-l", "INFO", "--without-mingle", program=[CELERY])
    first = the_loop(app)
    for number in range(40):
        app.tasks["note"].apply_async((number,), countdown=1 + number / 10)
    wait_until(lambda: executions(), 20)
    running.process.send_signal(signal.SIGHUP)
    running.wait_log(" ready.", times=2)
    second = the_loop(app, other_than=first)
    assert gone(first)
    assert second in running.tree
    wait_until(lambda: len(executions()) >= 40, 40, 0.05, message=running.log[-3000:])
    assert numbers(executions()) == Counter(range(40))
    assert running.stop() == 0
    assert not running.tree
    assert held(app) == NOTHING


# -------------------------------------------------------------------------------------------------- it leaves nothing


@pytest.mark.parametrize(
    ("how", "number"),
    [("warm", signal.SIGTERM), ("soft", signal.SIGQUIT), ("cold", signal.SIGQUIT), ("group", signal.SIGTERM)],
)
def test_a_worker_that_stops_while_it_releases_gives_back_what_it_holds(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], how: str, number: int
) -> None:
    """Nothing is left: no process, no lease, no watch. What was not released waits, and nothing is there twice."""
    conf = redis_broker.conf | {"delayadapters_direct": False}
    if how == "soft":
        conf |= {"worker_soft_shutdown_timeout": 1.0, "worker_enable_soft_shutdown_on_idle": True}
    app = make_app(conf)
    # The worker consumes another queue: what is released stays where it can be counted.
    running = worker(conf, "prefork", "-Q", "another")
    the_loop(app)
    total = 3_000
    ids = {job.id for job in schedule_many(app, total)}
    wait_until(lambda: redis_broker.size() > 200, 30)
    if how == "group":
        os.killpg(running.process.pid, number)  # as a terminal or a supervisor does it
    else:
        running.process.send_signal(number)
    running.process.wait(30)
    wait_until(lambda: not running.tree, 10)
    assert held(app) == NOTHING
    released = [json.loads(raw)["headers"]["id"] for raw in app.delayadapters.client.lrange(redis_broker.queue, 0, -1)]
    waiting = app.delayadapters.stats().waiting
    assert len(released) == len(set(released))
    assert len(released) + waiting == total
    assert set(released) <= ids


def schedule_many(app: Celery, count: int) -> list[Any]:
    """Tasks that are all due in a second and a half, stored at once."""
    from delayadapters import NewJob

    app.send_task("note", task_id="model", countdown=60)
    [model] = app.delayadapters.jobs().jobs
    app.delayadapters.cancel("model")
    payload = model.payload
    return app.delayadapters.schedule_many(
        NewJob(payload.replace(b"model", b"%05d" % n), delay=1.5, id=f"{n:05d}", meta=dict(model.meta))
        for n in range(count)
    )


# ---------------------------------------------------------------------------------------------------------- green pools


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_green_worker_says_what_to_do_and_schedules(
    redis_broker: Any, make_app: Callable[..., Celery], celeryd: Callable[..., Any],
    executions: Callable[[], list[Any]], pool: str,
) -> None:  # fmt: skip
    if importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    arguments = ("worker", "-P", pool, "-c", "5", "-l", "INFO", "--without-mingle", "--without-gossip")
    refused = celeryd(redis_broker.conf, *arguments, ready=None)
    assert refused.process.wait(60) != 0
    assert "delayadapters_embed = False" in refused.log
    assert "delay run" in refused.log

    conf = redis_broker.conf | {"delayadapters_embed": False, "delayadapters_min_delay": 0.1}
    app = make_app(conf)
    running = celeryd(conf, *arguments)
    releaser = run_releaser(app)  # as "celery delay run" does
    releaser.start()
    try:
        for _ in range(5):  # each is scheduled again by the green worker
            app.tasks["again"].apply_async((1, 0.3))
        wait_until(lambda: len(executions()) == 10, 40, 0.05, message=running.log[-3000:])
    finally:
        assert releaser.stop(20)
    assert Counter(run.retries for run in executions()) == {0: 5, 1: 5}
    assert {run.pid for run in executions()} == {running.process.pid}


# --------------------------------------------------------------------------------------------------------------- forks


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """``os.fork``, as a server that loads its application before it forks (uWSGI, gunicorn --preload) does it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(code)
    yield pid
    assert os.waitpid(pid, 0)[1] == 0


def test_children_of_a_process_that_has_used_its_queue_share_no_socket(
    redis_broker: Any, make_app: Callable[..., Celery], tmp_path: Path
) -> None:
    """Four children and their parent schedule at once, each from two threads; one more thread was busy at the fork."""
    conf = {key: value for key, value in redis_broker.conf.items() if key != "result_backend"}
    app = make_app(conf)
    app.send_task("note", task_id="first", countdown=60)
    go = tmp_path / "go"
    end = threading.Event()

    def busy() -> None:
        while not end.is_set():
            app.delayadapters.get("first")

    def schedule(who: str) -> None:
        def run(thread: int) -> None:
            for number in range(20):
                app.send_task("note", task_id=f"{who}-{thread}-{number}", countdown=60)

        wait_until(go.exists, 30)
        threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with (tmp_path / f"clients-{who}").open("w") as file:
            json.dump([connection._sock.getsockname() for connection in pooled(app)], file)
        wait_until((tmp_path / "all").exists, 30)  # keeps its sockets until all have told theirs

    other = threading.Thread(target=busy)
    other.start()
    try:
        with contextlib.ExitStack() as stack:
            for number in range(4):
                stack.enter_context(forked(lambda number=number: schedule(str(number))))  # type: ignore[misc]
            go.touch()
            mine = threading.Thread(target=schedule, args=("parent",))
            mine.start()
            wait_until(lambda: len(list(tmp_path.glob("clients-*"))) == 5, 40)
            (tmp_path / "all").touch()
            mine.join()
    finally:
        end.set()
        other.join()
    sockets = [tuple(one) for file in tmp_path.glob("clients-*") for one in json.loads(file.read_text())]
    assert len(sockets) >= 5
    assert len(sockets) == len(set(sockets))
    names = ("0", "1", "2", "3", "parent")
    expected = {"first", *(f"{who}-{t}-{n}" for who in names for t in range(2) for n in range(20))}
    jobs = app.delayadapters.jobs(limit=1000).jobs
    assert Counter(job.id for job in jobs) == Counter(expected)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger that only its own handlers hear."""
    made = logging.getLogger("delaytest.handlers")
    made.propagate = False
    yield made
    for handler in list(made.handlers):
        made.removeHandler(handler)
        handler.close()


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.settimeout(10)
    return made


def test_the_release_process_logs_wherever_its_worker_does(log: logging.Logger, tmp_path: Path) -> None:
    with (
        udp() as syslog,
        udp() as datagrams,
        socket.create_server(("127.0.0.1", 0)) as stream,
        socket.create_server(("127.0.0.1", 0)) as unrelated,
        contextlib.closing(multiprocessing.Queue()) as queue,
        socket.create_connection(unrelated.getsockname()) as client,
    ):
        target = logging.FileHandler(tmp_path / "buffered")
        for handler in (
            logging.handlers.SysLogHandler(syslog.getsockname()),
            logging.handlers.DatagramHandler(*datagrams.getsockname()),
            logging.handlers.SocketHandler(*stream.getsockname()),
            logging.FileHandler(tmp_path / "plain"),
            logging.handlers.MemoryHandler(1, target=target),
        ):
            log.addHandler(handler)
        log.error("the worker")  # opens what opens late
        log.addHandler(logging.handlers.QueueHandler(queue))
        reader, up = os.pipe()
        served, _ = unrelated.accept()
        logged, _ = stream.accept()

        def work() -> None:
            _let_go_of_inherited_files(up)
            log.error("its child")
            queue.close()
            queue.join_thread()
            os.write(up, b"1")
            wait_until((tmp_path / "end").exists, 30)

        with forked(work), served, logged:
            assert os.read(reader, 1) == b"1"
            for listener in (syslog, datagrams):
                assert b"the worker" in listener.recv(4096)
                assert b"its child" in listener.recv(4096)
            logged.settimeout(10)
            received = b""
            while b"its child" not in received:
                received += logged.recv(4096)
            for name in ("plain", "buffered"):
                assert (tmp_path / name).read_text() == "the worker\nits child\n"
            assert queue.get(timeout=10).getMessage() == "its child"
            served.settimeout(10)
            client.close()
            assert served.recv(1) == b"", "the child holds the worker's connections"
            (tmp_path / "end").touch()
        os.close(reader)
        os.close(up)


def pooled(app: Celery) -> list[Any]:
    pool = app.delayadapters.client.connection_pool
    found = [*pool._available_connections, *pool._in_use_connections]
    return [connection for connection in found if connection._sock is not None]


def test_a_fork_in_the_midst_of_making_the_queue(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    """Another thread holds our lock at the fork: the child must not wait for it."""
    app = make_app(redis_broker.conf)
    fixup = installed(app)
    assert fixup is not None
    with fixup._lock, forked(lambda: app.send_task("note", task_id="child", countdown=60) and None):
        pass
    assert app.delayadapters.get("child").state is State.WAITING


SPAWNED = """
import pickle, sys
app = pickle.loads(open(sys.argv[1], "rb").read())
app.send_task("note", task_id="spawned", countdown=60)
app.delayadapters.close()
"""


def test_a_pickled_app_in_a_spawned_process(redis_broker: Any, make_app: Callable[..., Celery], tmp_path: Path) -> None:
    """multiprocessing's spawn hands over a pickled app to a new interpreter; it has its fixup and its settings."""
    app = make_app(redis_broker.conf)
    app.send_task("note", task_id="parent", countdown=60)  # it has connections and locks by now
    file = tmp_path / "app"
    file.write_bytes(pickle.dumps(app))
    subprocess.run([sys.executable, "-c", SPAWNED, str(file)], check=True, timeout=60)
    assert {job.id for job in app.delayadapters.jobs().jobs} == {"parent", "spawned"}
    assert redis_broker.size() == 0


def test_threads_of_a_forked_child_that_start_at_once_each_have_a_queue(
    redis_broker: Any, make_app: Callable[..., Celery]
) -> None:
    """Both find the parent's queue and put it away; the second does so just when the first has made its own."""
    app = make_app(redis_broker.conf)
    app.send_task("note", task_id="first", countdown=60)
    fixup = installed(app)
    assert fixup is not None
    parents = fixup.queue()
    fixup._pid = 0  # as after a fork
    found: list[Any] = []

    def second_thread(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not DelayFixup.queue.__code__:
            return None
        if event == "line" and fixup._queue not in (None, parents):
            fixup._queue = None
        return second_thread

    def first_thread() -> None:
        sys.settrace(second_thread)
        try:
            found.append(fixup.queue())
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=first_thread)
    thread.start()
    thread.join()
    [queue] = found
    assert queue is not parents
    assert queue.get("first").state is State.WAITING
    queue.close()
