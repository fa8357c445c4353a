"""The release loop inside workers: a bootstep.

==================  =================================================================================================
pool                the loop runs in
==================  =================================================================================================
prefork, threads    a child process of the worker, as ``beat -B`` does; one that dies is started again, and it goes
                    when the worker goes, even by SIGKILL. (In a thread beside twenty others the loop waits for the
                    GIL so often that its 99th percentile of lateness is two to three times as high.)
solo, and others    a thread of the worker: no process beside it. A task that holds the GIL holds up the release
gevent, eventlet    refused: run ``celery -A proj delay run`` beside the worker
==================  =================================================================================================

Any number of loops may run on one queue, so every worker has one.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.platforms import set_mp_process_title
from celery.utils.log import get_logger

from .fixup import installed
from .metrics import check_metrics, serve_metrics
from .publisher import CeleryPublisher
from .settings import Settings, make_queue

if TYPE_CHECKING:
    from types import FrameType

    from ..metrics.serving import MetricsServer
    from ..release.threads import Releaser

__all__ = ["ReleaseProcess", "ReleaseStep", "ReleaseThread", "run_releaser"]

logger = get_logger(__name__)

STOP_TIMEOUT: Final = 5.0
"""Seconds a stopping loop has for the batch in its hands; what it has not finished then comes back by its lease."""
COLD_STOP_TIMEOUT: Final = 3.0
"""The same when the worker is told to go at once."""
LEASE: Final = 10.0
"""Seconds: how late a job comes when the process that was releasing it dies. Renewed while a publish goes on."""
_POLL: Final = 0.2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
_LONG_LIFE: Final = 60.0
_GREEN: Final = ("gevent", "eventlet")
_BESIDE: Final = ("prefork", "thread", "threads")
_START_TIMEOUT: Final = 30.0
"""Seconds a child may take to come up. One forked from many threads may find a lock held for ever by one of them."""


class ReleaseStep(bootsteps.StartStopStep):
    """Added to ``app.steps["worker"]`` by ``install``."""

    label = "DelayRelease"
    conditional = True
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        from . import panel  # noqa: F401  # registers the worker's remote control commands

        self.enabled = Settings(worker.app).embed
        super().__init__(worker, **kwargs)

    def create(self, worker: Any) -> ReleaseProcess | ReleaseThread:
        pool = worker.pool_cls if isinstance(worker.pool_cls, str) else worker.pool_cls.__module__
        if pool.endswith(_GREEN):
            raise ImproperlyConfigured(
                f"delayadapters does not run its release loop inside workers of the {pool.rpartition('.')[2]} pool. "
                "Run it beside them: set delayadapters_embed = False and start `celery -A … delay run`"
            )
        check_metrics(worker.app)
        make_queue(worker.app)  # a wrong setting should stop the worker now, not its child again and again
        found = installed(worker.app)
        if found is not None:
            found.direct.refusal()  # the worker's log should say so if tasks are not released inside Redis
        if pool.endswith(_BESIDE) and hasattr(os, "fork"):
            return ReleaseProcess(worker.app, worker.hostname)
        return ReleaseThread(worker.app)

    def info(self, worker: Any) -> dict[str, Any]:
        return {"delay_release": type(self.obj).__name__ if self.obj else None}


def run_releaser(app: Celery, **options: Any) -> Releaser:
    """A Releaser for the app on a queue and a connection of its own, not started; ``options`` are Releaser's."""
    from ..release.threads import Releaser

    return Releaser(make_queue(app), CeleryPublisher(app), **{"lease": LEASE, **options})


def _serve_metrics(app: Celery, releaser: Releaser) -> MetricsServer | None:
    """Whatever becomes of the metrics, tasks are released."""
    try:
        return serve_metrics(app, releaser)
    except Exception as error:  # OSError: no such address here, a privileged port, a name that resolves to nothing, …
        logger.error("The release loop's metrics are not served, tasks are released all the same: %s", error)
        return None


class ReleaseThread:
    """The loop in a thread of this process."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._releaser = run_releaser(app)
        self._metrics: MetricsServer | None = None

    def start(self) -> None:
        self._releaser.start()
        self._metrics = _serve_metrics(self._app, self._releaser)

    def stop(self) -> None:
        if self._metrics is not None:
            self._metrics.stop()
        self._releaser.stop(STOP_TIMEOUT)


class ReleaseProcess:
    """The loop in a child process, and a thread here that starts another when it dies."""

    def __init__(self, app: Celery, hostname: str) -> None:
        self._app = app
        self._hostname = hostname
        self._stopping = threading.Event()
        self._process: Any = None
        self._up: int | None = None
        self._supervisor: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        # The first child is forked here, in the main thread, before the worker has a broker connection.
        self._fork()
        self._supervisor = threading.Thread(target=self._supervise, name="delay-release-supervisor", daemon=True)
        self._supervisor.start()

    def stop(self) -> None:
        self._end(STOP_TIMEOUT)

    def terminate(self) -> None:
        self._end(COLD_STOP_TIMEOUT)

    def _end(self, patience: float) -> None:
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.join()
        if self._signal(signal.SIGTERM) and not self._wait(patience):
            logger.warning("The release process did not stop within %s s; killing it", patience)
            self._signal(signal.SIGKILL)
            self._wait(patience)
        self._close_signal()

    def _fork(self) -> None:
        from billiard.context import Process

        self._close_signal()
        self._up, up = os.pipe()
        try:
            self._process = Process(
                target=_child, args=(self._app, self._hostname, os.getpid(), up), name="DelayRelease", daemon=True
            )
            _forking.up = up
            self._process.start()
        finally:
            _forking.up = None
            os.close(up)
        self._born = time.monotonic()

    def _close_signal(self) -> None:
        if self._up is not None:
            os.close(self._up)
            self._up = None

    def _hangs(self) -> bool:
        """Whether the child has not come up in time."""
        if self._up is None:
            return False
        if select.select([self._up], [], [], 0)[0]:  # it has said so, or is dead
            self._close_signal()
            return False
        return time.monotonic() - self._born > _START_TIMEOUT

    def _supervise(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.wait(_POLL):
            if self._alive():
                if self._hangs():
                    logger.error("The release process (pid %s) did not come up; killing it", self.pid)
                    self._signal(signal.SIGKILL)
                continue
            lived = time.monotonic() - self._born
            pause = _FIRST_PAUSE if lived > _LONG_LIFE else min(pause * 2, _LONGEST_PAUSE)
            # A SIGTERM to the whole process group reaches the child first: see whether the worker is going, too.
            if self._stopping.wait(pause) or _worker_is_stopping():
                return
            logger.error("The release process (pid %s) died after %.1f s; starting another", self.pid, lived)
            try:
                self._fork()
            except OSError as error:
                logger.error("Could not start a release process: %s", error)

    def _alive(self) -> bool:
        """Asks the kernel: billiard cannot tell a child that somebody else has waited for from one that runs."""
        if self._process is None or self._process.pid is None:
            return False
        try:
            return os.waitpid(self._process.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def _signal(self, number: int) -> bool:
        if not self._alive():
            return False
        try:
            os.kill(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _wait(self, patience: float) -> bool:
        end = time.monotonic() + patience
        while self._alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


def _worker_is_stopping() -> bool:
    from celery.worker import state

    return any(flag not in (None, False) for flag in (state.should_stop, state.should_terminate))


# ------------------------------------------------------------------------------------------------------- in the child


def _child(app: Celery, hostname: str, parent: int, up: int) -> None:
    """The child's life: say through ``up`` that it is there, release until told to stop or the worker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the worker says when to stop
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _follow_parent_into_death(parent)
    # What the worker has made stays: to look through it for garbage would take ten milliseconds and more, in which
    # nothing is released, and copy its memory.
    gc.freeze()
    random.seed()  # or all children would pause alike
    set_mp_process_title("celeryd", info="delay release", hostname=hostname)
    app.set_default()
    app.set_current()
    releaser = run_releaser(app)
    # A service manager tells all processes at once, and then the worker tells us: no sign of impatience.
    stop_on_signals(releaser, signal.SIGTERM, patiently=True)
    threading.Thread(target=_watch_parent, args=(releaser, parent), name="delay-parent-watch", daemon=True).start()
    _serve_metrics(app, releaser)
    os.write(up, b"1")
    os.close(up)
    releaser.run()


def stop_on_signals(releaser: Releaser, *numbers: int, patiently: bool = False) -> None:
    """Stop gracefully on these signals. At the second one give up at once (leases bring back what was held), unless
    ``patiently``."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            if patiently:
                return
            os._exit(1)
        stopping.set()
        # In a thread: stop() waits for run(), which this handler interrupts.
        threading.Thread(target=end, name="delay-stop", daemon=True).start()

    def end() -> None:
        if not releaser.stop(STOP_TIMEOUT):
            os._exit(1)

    stopping = threading.Event()
    for number in numbers:
        signal.signal(number, handle)


def _follow_parent_into_death(parent: int) -> None:
    """Linux: be told (SIGTERM) the moment the worker dies. Elsewhere :func:`_watch_parent` notices within a second."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        try:
            ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
        except (OSError, AttributeError) as error:
            logger.debug("prctl is not available: %s", error)
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


def _watch_parent(releaser: Releaser, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    releaser.stop(STOP_TIMEOUT)
    os._exit(0)


_forking = threading.local()


def _just_forked() -> None:
    """In every new child, ours or not. Ours lets go of the worker's files before any other after-fork handler runs.

    kombu's closes pooled connections, and waits for the answer to a command that one of them may have under way: on a
    socket which the child shares with the worker, perhaps for ever.
    """
    up = getattr(_forking, "up", None)
    if up is not None:
        _let_go_of_inherited_files(up)


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no prefork pool either
    os.register_at_fork(after_in_child=_just_forked)


def _let_go_of_inherited_files(but: int) -> None:
    """Drop the worker's sockets and pipes: while a child holds them, no peer sees the worker close them.

    Their numbers stay taken (by /dev/null): objects of the worker's that still refer to one must not close a file of
    ours that came to the same number.
    """
    keep = {0, 1, 2, but, *_logging_files()}
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        number = int(name)
        if number not in keep and number != null:
            try:
                os.fstat(number)
                os.dup2(null, number, inheritable=False)
            except OSError:
                continue


def _logging_files() -> Iterator[int]:
    """Where this process logs to: streams, sockets (syslog), pipes (a queue to a process that logs)."""
    found: list[logging.Logger | logging.PlaceHolder] = [
        logging.getLogger(),
        *logging.Logger.manager.loggerDict.values(),
    ]
    todo: list[Any] = [handler for logger in found for handler in getattr(logger, "handlers", ())]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in list(getattr(one, "__dict__", {}).items()):
            if isinstance(value, logging.Handler) or name in ("queue", "listener"):
                todo.append(value)
            try:
                number = value.fileno()
            except (AttributeError, OSError, TypeError, ValueError):  # not a file, or a closed one
                continue
            if isinstance(number, int):
                yield number
