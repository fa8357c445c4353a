"""Where a Celery process that releases serves its metrics: ``delayadapters_metrics_port``, ``…_metrics_host``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.exceptions import ImproperlyConfigured

from ..metrics.address import DEFAULT_HOST, check_address
from .settings import Settings, make_queue

if TYPE_CHECKING:
    from ..metrics.serving import MetricsServer
    from ..release.threads import Releaser

__all__ = ["check_metrics", "serve_metrics"]

_TIMEOUT = 2.0
"""Seconds for a question to Redis: a scrape asks three, and Prometheus gives it ten."""


def check_metrics(app: Celery) -> None:
    """Raises ImproperlyConfigured for a bad setting, or one that asks for what is not installed."""
    _address(app, None, None)


def serve_metrics(
    app: Celery, releaser: Releaser, port: int | None = None, host: str | None = None
) -> MetricsServer | None:
    """Serves metrics, if there is a port: the argument, else the setting."""
    port, host = _address(app, port, host)
    if port is None:
        return None
    from ..metrics.serving import serve

    return serve(make_queue(app, timeout=_TIMEOUT), releaser, port=port, host=host)


def _address(app: Celery, port: int | None, host: str | None) -> tuple[int | None, str]:
    settings = Settings(app)
    wanted: Any = settings._get("metrics_port") if port is None else port
    if isinstance(wanted, str) and wanted.strip().isdecimal():  # from the environment
        wanted = int(wanted)
    address = host or settings._get("metrics_host") or DEFAULT_HOST
    try:
        check_address(wanted, address)
    except (ImportError, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"delayadapters_{error}") from error
    return wanted, address
