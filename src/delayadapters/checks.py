"""What is wrong with a Redis server that delayed jobs are trusted to. No I/O: the release loops ask and log.

Each finding says what it means and what to type. A server that may not be asked (ACL) is not found fault with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["QUESTIONS", "Finding", "Gravity", "look"]

QUESTIONS: Final[tuple[tuple[str, ...], ...]] = (("INFO",), ("CONFIG", "GET", "save"), ("TIME",))
"""The commands whose replies :func:`look` takes, in this order."""
OLDEST: Final = (6, 2)
CLOCK_TOLERANCE: Final = 1.0
"""Seconds by which the server's clock and ours may differ. Relative delays do not care; absolute times do."""

Gravity = Literal["problem", "warning"]
"""``problem``: jobs can be lost, or are not released. ``warning``: they can be late, or fewer than all are safe."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``code`` is stable, for programs: eviction, persistence, version, clock, replica (``doctor`` has more).

    ``meaning`` says what is so and what follows from it, ``remedy`` what to type or do.
    """

    code: str
    meaning: str
    remedy: str
    gravity: Gravity = "problem"

    @property
    def text(self) -> str:
        """Both, for a log line."""
        return f"{self.meaning}. {self.remedy}"


def look(replies: tuple[Any, Any, Any], local_time: float) -> list[Finding]:
    """Findings from the replies to :data:`QUESTIONS` (None: not allowed to ask). ``local_time``: seconds since 1970."""
    info, save, clock = replies
    found: list[Finding] = []
    if isinstance(info, Mapping):
        found += _version(str(info.get("redis_version", "")))
        found += _eviction(str(info.get("maxmemory_policy", "noeviction")))
        found += _persistence(info, save)
        if info.get("role") in ("slave", "replica"):
            found.append(
                Finding("replica", "this server is a replica: nothing can be released there", "Connect to the primary")
            )
    if clock is not None:
        offset = float(clock[0]) + float(clock[1]) / 1e6 - local_time
        if abs(offset) > CLOCK_TOLERANCE:
            found.append(
                Finding(
                    "clock",
                    f"the Redis server's clock is {abs(offset):.1f} s "
                    f"{'ahead of' if offset > 0 else 'behind'} this machine's; "
                    "absolute times (at=, eta=) are off by as much",
                    "Synchronise both (NTP)",
                    "warning",
                )
            )
    return found


def _version(text: str) -> list[Finding]:
    parts = re.match(r"(\d+)\.(\d+)", text)
    if parts is None or (int(parts[1]), int(parts[2])) >= OLDEST:
        return []
    meaning = f"Redis {text} is too old: delayed jobs need commands of 6.2 (GETEX, ZMSCORE, ZRANGE BYSCORE)"
    return [Finding("version", meaning, "Upgrade to Redis 6.2 or later, or Valkey")]


def _eviction(policy: str) -> list[Finding]:
    if policy == "noeviction":
        return []
    return [
        Finding(
            "eviction",
            f"maxmemory-policy is {policy}: Redis may delete waiting jobs when memory is short",
            "CONFIG SET maxmemory-policy noeviction",
        )
    ]


def _persistence(info: Mapping[str, Any], save: Any) -> list[Finding]:
    if int(info.get("aof_enabled", 0) or 0):
        return []
    points = _value(save)
    if points is None:  # may not ask for the configuration
        return []
    remedy = "CONFIG SET appendonly yes"
    if points == "":
        return [Finding("persistence", "no persistence: a restart of Redis loses every waiting job", remedy)]
    meaning = f"snapshots only (save {points}): a crash of Redis loses the jobs since the last one"
    return [Finding("persistence", meaning, remedy, "warning")]


def _value(save: Any) -> str | None:
    """``CONFIG GET save``: a mapping (redis-py's callback, RESP3) or a list; keys and values bytes or str."""
    if isinstance(save, Mapping):
        values = list(save.values())
    elif isinstance(save, (list, tuple)):
        values = list(save[1::2])
    else:
        return None
    if not values:
        return None
    return values[0].decode() if isinstance(values[0], bytes) else str(values[0])
