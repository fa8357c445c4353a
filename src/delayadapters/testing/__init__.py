"""For users' own tests: delayed jobs in memory, on a clock that the test moves; no Redis, no broker, no waiting.

========================  ============================  ==============================================================
pytest fixture            without pytest                for
========================  ============================  ==============================================================
``delay_clock``           :class:`ManualClock`          the clock which all of them share
``delayed_celery(app)``   ``.celery.DelayedCelery``     Celery
``delayed_taskiq(b)``     ``.taskiq.DelayedTaskiq``     taskiq
``delayed_arq(settings)`` ``.arq.DelayedArq``           arq
========================  ============================  ==============================================================

Nothing here imports a framework; the modules named after one do. See docs/how-to/testing.md.
"""

from __future__ import annotations

from ..clock import ManualClock
from .delayed import Delayed
from .errors import ClockMismatch, ReleaseFailed
from .jobs import ScheduledJob

__all__ = ["ClockMismatch", "Delayed", "ManualClock", "ReleaseFailed", "ScheduledJob"]
