"""``delayadapters metrics``: a queue's metrics from the Redis state alone, for where no process of ours serves them."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import click

from ..cli.desk import is_redirection, open_queue
from ..errors import RedisFault

__all__ = ["metrics"]

DEFAULT_PORT = 9808


@click.command("metrics")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; in a container 0.0.0.0.")
@click.pass_context
def metrics(ctx: click.Context, port: int, host: str) -> None:
    """Serve /metrics, /healthz and /readyz of a queue for Prometheus.

    Everything is read from Redis when asked for, so this may run anywhere, beside or in place of workers that serve
    metrics themselves. Give the group's --timeout fewer seconds than Prometheus gives a scrape. SIGTERM or Ctrl-C ends
    it. There is no --json: /metrics is for programs.
    """
    try:
        from .serving import MetricsServer
    except ImportError as error:
        raise click.ClickException(str(error)) from error

    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with open_queue(ctx) as queue:
        server = MetricsServer(queue, port=port, host=host)
        try:
            bound = server.start()
        except OSError as error:
            raise click.ClickException(f"cannot listen on {host}:{port}: {error}") from error
        if not bound:
            server.stop()
            raise click.ClickException(f"cannot listen on {host}:{port}: another process does")
        click.echo(f"metrics of queue {queue.name!r} on http://{host}:{server.port}/metrics", err=True)
        try:
            queue.stats()
        except RedisFault as error:
            # Redis may come back; a node of a cluster will never have what is on the others.
            if is_redirection(error.__cause__):
                server.stop()
                raise
        while not ended.wait(0.5):  # short, so that signal handlers get their turn
            pass
        server.stop()
