"""Metrics of delay queues, for Prometheus and OpenTelemetry (extra ``metrics``).

======================  ===============================================================================================
:class:`QueueCollector`  for ``prometheus_client``: ``REGISTRY.register(QueueCollector(queue, releaser))``
:func:`serve`            ``/metrics``, ``/healthz`` and ``/readyz`` on a port, from a thread
:func:`instrument`       for OpenTelemetry: the same names, from a meter
======================  ===============================================================================================

What is told of a queue is read from Redis when asked for: every process tells the same, and none needs to be asked in
particular. What is told of a release loop (claims, batches) is of the process that runs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .otel import instrument
    from .prometheus import QueueCollector
    from .serving import MetricsServer, serve

__all__ = ["MetricsServer", "QueueCollector", "instrument", "serve"]

_HOME: Final = {
    "MetricsServer": "serving",
    "QueueCollector": "prometheus",
    "instrument": "otel",
    "serve": "serving",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: each needs another package of the extra."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
