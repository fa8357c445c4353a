"""``celery -A proj delay …``: found through the entry-point group ``celery.commands``.

Every ``celery`` call imports this module: it must stay light, so what a command needs is imported when it runs.
(``panel`` needs no more than ``celery inspect`` has imported already; it makes ``celery inspect delayed`` known.)
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import click
from celery.bin.base import LOG_LEVEL, CeleryCommand, CeleryOption, handle_preload_options

from . import panel  # noqa: F401
from .steer import add_commands, sit_down_at_celery

__all__ = ["delay"]


_LEASE = "Seconds; how late a job comes when the process that was releasing it dies."

_METRICS = "Serve /metrics, /healthz and /readyz there. Default: the setting delayadapters_metrics_port."

_option = partial(click.option, cls=CeleryOption, help_group="Release")


@click.group(name="delay")
@click.pass_context
@handle_preload_options
def delay(ctx: click.Context, **_: Any) -> None:
    """Delayed tasks that wait in Redis (delayadapters)."""
    sit_down_at_celery(ctx)


@delay.command(name="run", cls=CeleryCommand)
@_option("--batch", type=click.IntRange(1), default=500, show_default=True, help="Jobs claimed at once, at most.")
@_option("--lease", type=click.FloatRange(1.0), default=10.0, show_default=True, help=_LEASE)
@_option("--metrics-port", type=click.IntRange(0, 65535), help=_METRICS)
@_option("--metrics-host", help="Address to listen on; default 127.0.0.1, in a container 0.0.0.0.")
@_option("-l", "--loglevel", type=LOG_LEVEL, default="INFO", show_default=True, help="Logging level.")
@_option("-f", "--logfile", default=None, help="Log file; default: stderr.")
@click.pass_context
def run(
    ctx: click.Context,
    batch: int,
    lease: float,
    metrics_port: int | None,
    metrics_host: str | None,
    loglevel: int,
    logfile: str | None,
) -> None:
    """Release due tasks to the broker, in this process.

    Workers do so by themselves (delayadapters_embed); run it where they cannot (gevent, eventlet), or where the
    release should not depend on any worker. Any number may run at once. SIGTERM or SIGINT stops it gracefully.
    """
    from celery.exceptions import ImproperlyConfigured
    from celery.utils.log import get_logger

    from .fixup import installed
    from .hosting import run_releaser, stop_on_signals
    from .metrics import serve_metrics
    from .settings import Settings

    app = ctx.obj.app
    app.loader.import_default_modules()
    if installed(app) is None:
        raise click.UsageError("this app has no delay queue: call delayadapters.celery.install(app) where it is made")
    app.log.setup(loglevel, logfile, redirect_stdouts=False)
    app.set_current()
    logger = get_logger(__name__)
    releaser = run_releaser(app, batch=batch, lease=lease)
    stop_on_signals(releaser, signal.SIGTERM, signal.SIGINT)
    logger.info("delay release: queue %r, broker %s", Settings(app).name, app.connection_for_write().as_uri())
    releaser.start()
    try:
        metrics = serve_metrics(app, releaser, metrics_port, metrics_host)
    except (ImproperlyConfigured, OSError) as error:
        releaser.stop()
        raise click.ClickException(str(error)) from error
    releaser.join()
    if metrics is not None:
        metrics.stop()
    logger.info("delay release: stopped")


add_commands(delay)
