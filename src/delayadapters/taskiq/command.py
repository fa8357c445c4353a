"""``taskiq delay-release module:broker``: found through the entry-point group ``taskiq_cli``.

Every ``taskiq`` call imports this module, and catches nothing but ImportError there: it must stay light, so what the
command needs is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from taskiq.abc.cmd import TaskiqCMD

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["DelayReleaseCMD"]


class DelayReleaseCMD(TaskiqCMD):
    """Releases due tasks in a process of its own."""

    short_help = "Release delayed tasks (delayadapters)"

    def exec(self, args: Sequence[str]) -> int | None:
        """Runs until SIGTERM or SIGINT, then answers 0. 2: nothing to run. 1: the broker could not be started, or the
        release loop ended by itself; whoever supervises the process is to start it again."""
        import logging

        options = parse(args)
        if options.configure_logging:
            logging.basicConfig(level=options.log_level, format="[%(asctime)s][%(name)s][%(levelname)-7s] %(message)s")
        try:
            broker, middleware = load(options)
            serve_at(middleware, options.metrics_port, options.metrics_host)
        except Problem as problem:
            print(f"taskiq delay-release: {problem}", file=sys.stderr)
            return 2
        import asyncio

        return asyncio.run(release(broker, middleware, options.shutdown_timeout))


class Problem(Exception):
    """What keeps the command from starting, for its user."""


def parse(args: Sequence[str]) -> Namespace:
    from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

    parser = ArgumentParser(
        prog="taskiq delay-release",
        formatter_class=ArgumentDefaultsHelpFormatter,
        description="Release delayed tasks into their broker when they are due. Workers do so by themselves; run this "
        "where the release should not depend on any worker. Any number may run at once.",
    )
    parser.add_argument("broker", help="module:variable of a broker with a DelayMiddleware, or of a function making it")
    parser.add_argument("modules", nargs="*", help="modules to import, for tasks and their labels")
    parser.add_argument("--app-dir", "-d", default=None, help="directory to import from")
    parser.add_argument("--shutdown-timeout", type=float, default=5.0, help="seconds for the broker's shutdown")
    parser.add_argument("--metrics-port", type=int, default=None, help="serve /metrics, /healthz and /readyz there")
    parser.add_argument("--metrics-host", default=None, help="address to listen on; in a container 0.0.0.0")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
    parser.add_argument("--no-configure-logging", dest="configure_logging", action="store_false")
    return parser.parse_args(args)


def load(options: Namespace) -> tuple[Any, Any]:
    """The broker and its middleware."""
    import inspect

    from taskiq import AsyncBroker, InMemoryBroker
    from taskiq.cli.utils import import_object, import_tasks

    from .source import middleware_of

    try:
        broker = import_object(options.broker, app_dir=options.app_dir)
    except (ImportError, AttributeError, ValueError) as error:
        raise Problem(f"cannot import {options.broker!r} (module:variable): {error}") from error
    if inspect.isfunction(broker):
        broker = broker()
    if not isinstance(broker, AsyncBroker):
        raise Problem(f"{options.broker!r} is no taskiq broker but {broker!r}")
    if isinstance(broker, InMemoryBroker):
        raise Problem("an InMemoryBroker runs its tasks in its own process, so they cannot be released from another")
    import_tasks(options.modules, [], False)
    try:
        return broker, middleware_of(broker)
    except RuntimeError as error:
        raise Problem(str(error)) from error


def serve_at(middleware: Any, port: int | None, host: str | None) -> None:
    """The command line's word counts more than the middleware's."""
    from ..metrics.address import check_address

    middleware.metrics_port = middleware.metrics_port if port is None else port
    middleware.metrics_host = host or middleware.metrics_host
    try:
        check_address(middleware.metrics_port, middleware.metrics_host)
    except (ImportError, TypeError, ValueError) as error:
        raise Problem(str(error)) from error


async def release(broker: Any, middleware: Any, shutdown_timeout: float) -> int:
    import asyncio
    import logging
    import signal

    log = logging.getLogger("delayadapters.taskiq")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    middleware.release_here = True
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(broker.startup())
    await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # A broker may try to connect for ever.
        starting.cancel()
        await asyncio.wait({starting}, timeout=shutdown_timeout)
        log.info("delay release: stopped before the broker had started")
        return 0
    if (error := starting.exception()) is not None:
        log.error("the broker could not be started: %s: %s", type(error).__name__, error)
        return 1
    ended = asyncio.ensure_future(middleware.release_ended())
    await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    failed = not stop.is_set()
    stopping.cancel()
    ended.cancel()
    try:
        await asyncio.wait_for(broker.shutdown(), shutdown_timeout)
    except asyncio.TimeoutError:
        log.warning("the broker did not shut down within %s s", shutdown_timeout)
    log.info("delay release: %s", "ended by itself, see above" if failed else "stopped")
    return 1 if failed else 0
