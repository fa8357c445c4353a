"""``/metrics``, ``/healthz`` and ``/readyz`` on a port, from a thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
except ImportError as error:
    raise ImportError("these metrics need prometheus-client: pip install 'delayadapters[metrics]'") from error

from ..redis.aio import AsyncDelayQueue
from ..redis.sync import DelayQueue
from .address import DEFAULT_HOST, check_address
from .measuring import SomeReleaser
from .prometheus import QueueCollector
from .reading import reader_of

__all__ = ["DEFAULT_HOST", "MetricsServer", "serve", "serve_beside"]

log: Final = logging.getLogger("delayadapters.metrics")
AGAIN: Final = 15.0
"""Seconds between the attempts to get a port that another process has."""
SILENCE: Final = 30.0
"""Seconds without an answer from Redis after which a loop is not ready. Its longest pause is 15 s; a publish speaks to
Redis at a third of its lease."""


class MetricsServer:
    """Serves a queue's metrics, and the health of the release loop in this process, if there is one.

    ============  ====================================================================================================
    ``/metrics``  the metrics (Prometheus text format, OpenMetrics when asked for)
    ``/healthz``  200 while this process lives and its release loop runs, else 503
    ``/readyz``   200 while Redis answers and the release loop has heard from it lately, else 503 and why
    ============  ====================================================================================================

    Args:
        queue, releaser, loop: as for QueueCollector.
        port: 0 takes a free one.
        host: the address to listen on.
    """

    def __init__(
        self,
        queue: DelayQueue | AsyncDelayQueue,
        releaser: SomeReleaser | None = None,
        *,
        port: int,
        host: str = DEFAULT_HOST,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        check_address(port, host)
        self.collector = QueueCollector(queue, releaser, loop=loop)
        self.registry = CollectorRegistry()
        self.registry.register(self.collector)
        self._ask = reader_of(queue, loop)
        self._releaser = releaser
        self._address = (host, port)
        self._ended = threading.Event()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        """The port it listens on; None: not, or not yet."""
        return self._server.server_port if self._server is not None else None

    def start(self) -> bool:
        """Listens from now on. False: another process has the port; then it tries again until it gets it.

        Workers of one host may share a port: whichever has it tells the same of the queue.

        Raises:
            OSError: the address cannot be listened on at all.
        """
        bound = self._bind()
        if not bound:
            log.warning(
                "metrics address=%s:%s taken by another process: not served here until it is free", *self._address
            )
        self._thread = threading.Thread(target=self._run, name="delayadapters-metrics", daemon=True)
        self._thread.start()
        return bound

    def stop(self) -> None:
        """Listens no more."""
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
        if self._thread is not None:
            self._thread.join(5)

    def _bind(self) -> bool:
        try:
            self._server = _Server(self._address, self)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        log.info("metrics address=%s:%s served", self._address[0], self.port)
        return True

    def _run(self) -> None:
        while self._server is None:
            if self._ended.wait(AGAIN):
                return
            try:
                self._bind()
            except OSError as error:
                log.warning("metrics address=%s:%s cannot be served: %s", *self._address, error)
                return
        with self._server:
            self._server.serve_forever(poll_interval=0.2)

    # ------------------------------------------------------------ what is asked

    def unhealthy(self) -> str | None:
        """Why this process should be started again; None: no reason."""
        if self._releaser is not None and not self._releaser.running:
            return "the release loop has ended"
        return None

    def unready(self) -> str | None:
        """Why nothing is released here at the moment; None: no reason."""
        why = self.unhealthy()
        if why is not None:
            return why
        if self._releaser is not None:
            silence = self._releaser.heard_ago
            if silence > max(SILENCE, self._releaser.lease / 2):
                return f"the release loop has not heard from Redis for {silence:.0f} s"
        try:
            self._ask()
        except Exception as error:
            return f"Redis does not answer: {type(error).__name__}"
        return None


def serve(
    queue: DelayQueue | AsyncDelayQueue,
    releaser: SomeReleaser | None = None,
    *,
    port: int,
    host: str = DEFAULT_HOST,
    loop: asyncio.AbstractEventLoop | None = None,
) -> MetricsServer:
    """A started :class:`MetricsServer`."""
    server = MetricsServer(queue, releaser, port=port, host=host, loop=loop)
    server.start()
    return server


def serve_beside(
    queue: DelayQueue | AsyncDelayQueue, releaser: SomeReleaser | None, *, port: int, host: str = DEFAULT_HOST
) -> MetricsServer | None:
    """:func:`serve` beside the work of a worker: an address that cannot be listened on is logged, and jobs are released
    all the same."""
    try:
        return serve(queue, releaser, port=port, host=host)
    except OSError as error:  # no such address here, a privileged port, a name that resolves to nothing, …
        log.error("metrics address=%s:%s cannot be served, jobs are released all the same: %s", host, port, error)
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], owner: MetricsServer) -> None:
        self.owner = owner
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks for the host's name, which may take the resolver's time.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def do_GET(self) -> None:
        owner, path = self.server.owner, self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(owner.registry), kind)
        elif path in ("/healthz", "/readyz"):
            why = owner.unhealthy() if path == "/healthz" else owner.unready()
            self._answer(503 if why else 200, f"{why or 'ok'}\n".encode())
        else:
            self._answer(404, b"/metrics /healthz /readyz\n")

    do_HEAD = do_GET  # noqa: N815  # http.server's name

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Nothing: a scrape is no news."""
