"""``delayadapters arq module.WorkerSettings`` (arq's own command, for a ``DelayWorker``) and ``arq-migrate``."""

from __future__ import annotations

import asyncio
import logging.config
import os
import sys
from dataclasses import replace
from signal import Signals
from typing import Any

import click
from arq.logs import default_log_config
from arq.utils import import_string
from arq.version import VERSION
from arq.worker import check_health

from .client import create_pool
from .migration import migrate
from .settings import DelaySettings
from .worker import create_worker, get_kwargs, run_worker

__all__ = ["arq", "arq_migrate"]


def _import(path: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_string(path)
    except ImportError as error:
        raise click.BadParameter(f"{path!r}: {error}; give it as module.NAME") from error


@click.command("arq")
@click.version_option(VERSION, "-V", "--version", prog_name="arq")
@click.argument("worker-settings", type=str, required=True)
@click.option("--burst/--no-burst", default=None, help="Batch mode: exit once no jobs are found in any queue.")
@click.option(
    "--burst-deferred/--no-burst-deferred",
    default=None,
    help="In batch mode, wait for deferred jobs of this queue too (default: yes, as arq does).",
)
@click.option("--check", is_flag=True, help="Health Check: run a health check and exit.")
@click.option(
    "--watch",
    type=click.Path(exists=True, dir_okay=True, file_okay=False),
    help="Watch a directory and reload the worker upon changes.",
)
@click.option("-v", "--verbose", is_flag=True, help="Enable verbose output.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve /metrics, /healthz and /readyz there. Default: what DelaySettings say.",
)
@click.option("--metrics-host", help="Address to listen on; in a container 0.0.0.0.")
@click.option(
    "--custom-log-dict", type=str, help="Import path for a dictionary in logdict form, to configure Arq's own logging."
)
def arq(
    *,
    worker_settings: str,
    burst: bool | None,
    burst_deferred: bool | None,
    check: bool,
    watch: str | None,
    verbose: bool,
    custom_log_dict: str | None,
    metrics_port: int | None,
    metrics_host: str | None,
) -> None:
    """Run an arq worker whose deferred jobs are on time.

    WORKER_SETTINGS is what arq's own command takes: the import path of a class or a dict, module.WorkerSettings.
    """
    settings = _import(worker_settings)
    logging.config.dictConfig(_import(custom_log_dict) if custom_log_dict else _log_config(verbose))
    if check:
        sys.exit(check_health(settings))
    given = {"burst": burst, "burst_deferred": burst_deferred}
    kwargs: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    address = {"metrics_port": metrics_port, "metrics_host": metrics_host}
    address = {key: value for key, value in address.items() if value is not None}
    if address:
        kwargs["delay_settings"] = _serving(get_kwargs(settings).get("delay_settings"), address)
    if watch:
        asyncio.run(_watch_reload(watch, settings, kwargs))
    else:
        run_worker(settings, **kwargs)


def _serving(settings: DelaySettings | None, address: dict[str, Any]) -> DelaySettings:
    try:
        return replace(settings or DelaySettings(), **address)
    except (ImportError, TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _log_config(verbose: bool) -> dict[str, Any]:
    """arq's, with our loggers beside its own."""
    config: dict[str, Any] = default_log_config(verbose)
    config["loggers"] = {**config["loggers"], "delayadapters": dict(config["loggers"]["arq"])}
    return config


async def _watch_reload(path: str, settings: Any, kwargs: dict[str, Any]) -> None:
    """arq/cli.py, ``watch_reload``."""
    try:
        from watchfiles import awatch  # type: ignore[import-not-found]
    except ImportError as error:
        raise click.ClickException("watchfiles is not installed: pip install watchfiles") from error

    loop = asyncio.get_running_loop()
    stop_event = asyncio.Event()

    def worker_on_stop(signal: Signals) -> None:
        if signal != Signals.SIGUSR1:
            stop_event.set()

    worker = create_worker(settings, **{key: kwargs[key] for key in kwargs if key == "delay_settings"})
    tasks = set()
    try:
        worker.on_stop = worker_on_stop
        tasks.add(loop.create_task(worker.async_run()))
        async for _ in awatch(path, stop_event=stop_event):
            print("\nfiles changed, reloading arq worker...")
            worker.handle_sig(Signals.SIGUSR1)
            await worker.close()
            tasks.add(loop.create_task(worker.async_run()))
    finally:
        await worker.close()


@click.command("arq-migrate")
@click.argument("worker-settings", type=str, required=True)
@click.option("--yes", is_flag=True, help="Move them. Without it this is a dry run.")
@click.option(
    "--margin", type=click.FloatRange(0.0), default=5.0, show_default=True, help="Seconds: leave sooner ones."
)
def arq_migrate(*, worker_settings: str, yes: bool, margin: float) -> None:
    """Take over jobs that arq itself has deferred.

    They move from arq's queue into the delay queue, each at most once, while workers and clients go on. Run it without
    --yes first: it then only says what it would do.
    """
    report = asyncio.run(_migrate(get_kwargs(_import(worker_settings)), yes, margin))
    click.echo(f"{report.found} jobs deferred by arq; {report.moved} {'moved' if yes else 'would be moved'}")
    if report.first_due is not None and report.last_due is not None:
        click.echo(f"due from {report.first_due:%Y-%m-%d %H:%M:%S} to {report.last_due:%Y-%m-%d %H:%M:%S} UTC")
    for count, why in (
        (report.gone, "started, ended or changed meanwhile: left alone"),
        (len(report.lost), "have lost their payload to its TTL: left to arq, which records them as expired"),
        (len(report.unreadable), "cannot be read by these settings' job_deserializer: left alone"),
    ):
        if count:
            click.echo(f"{count} {why}")
    for job_id in report.unreadable[:10]:
        click.echo(f"  {job_id}")
    if not yes and report.moved:
        click.echo("this was a dry run: --yes moves them")


async def _migrate(kwargs: dict[str, Any], yes: bool, margin: float) -> Any:
    names = ("job_serializer", "job_deserializer", "expires_extra_ms", "delay_settings")
    options = {name: kwargs[name] for name in names if name in kwargs}
    if kwargs.get("queue_name"):
        options["default_queue_name"] = kwargs["queue_name"]
    redis = await create_pool(kwargs.get("redis_settings"), **options)
    try:
        if not yes:
            return await migrate(redis, dry_run=True, margin=margin)
        with click.progressbar(length=1, label="moving", file=sys.stderr) as bar:

            def progress(done: int, total: int) -> None:
                bar.length = total
                bar.update(done - bar.pos)

            return await migrate(redis, dry_run=False, margin=margin, progress=progress)
    finally:
        await redis.aclose()
