"""What the helpers raise, and what they warn of."""

from __future__ import annotations

import time
import warnings
from datetime import datetime

from ..clock import ManualClock
from ..due import to_micros
from ..errors import DelayError

__all__ = ["ClockMismatch", "ReleaseFailed", "warn_if_passed"]


class ReleaseFailed(DelayError):
    """A due job could not be handed to the framework's broker. It is dead now; the clock stands at its due time."""


class ClockMismatch(UserWarning):
    """A job was scheduled for a time that is yet to come on the machine's clock, and over on the test's: it is due now.

    Let the machine's time follow the test's: ``delay_clock.follow(traveller.move_to)``, with time-machine or freezegun.
    """


def warn_if_passed(at: datetime | None, clock: ManualClock, what: str) -> None:
    """Warns of a ClockMismatch. ``at``: the absolute time that was asked for."""
    if at is None or at.utcoffset() is None or not time.time_ns() // 1000 < to_micros(at) <= clock.micros:
        return
    warnings.warn(
        f"{what} was scheduled for {at.isoformat()}, which is over on the test's clock ({clock.now().isoformat()}) but "
        "not on the machine's: code that asks the machine for the time needs it to follow the test's clock, "
        "delay_clock.follow(traveller.move_to) with time-machine or freezegun",
        ClockMismatch,
        stacklevel=2,
    )
