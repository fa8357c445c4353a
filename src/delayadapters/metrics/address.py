"""Where metrics are served. Needs no package of the extra: settings are checked where it may not be installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["DEFAULT_HOST", "check_address", "check_extra"]

DEFAULT_HOST: Final = "127.0.0.1"
"""Metrics tell of a business and ask for no password. In a container: 0.0.0.0."""


def check_address(port: int | None, host: str) -> None:
    """A port to serve metrics on (None: none) and the address to listen on.

    Raises:
        TypeError, ValueError: anything else; naming ``metrics_port`` or ``metrics_host``.
    """
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535):
        raise ValueError(f"metrics_port must be an int from 0 to 65535 (0: a free one) or None, got {port!r}")
    if not isinstance(host, str) or not host:
        raise TypeError(f"metrics_host must be an address to listen on, got {host!r}")
    check_extra(port)


def check_extra(port: int | None) -> None:
    """Raises ImportError, naming the extra, when there is a port and not what it takes to serve on it."""
    if port is not None and find_spec("prometheus_client") is None:
        raise ImportError("metrics_port needs prometheus-client: pip install 'delayadapters[metrics]'")
