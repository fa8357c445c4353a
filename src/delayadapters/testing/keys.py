"""What arq asks of Redis, in memory: strings and sorted sets which expire by the test's clock. Nothing more."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from ..clock import ManualClock
from ..due import from_micros
from ..jobs import Claim, Command, Payload

__all__ = ["Keyspace", "NotSimulated"]


class NotSimulated(RuntimeError):
    """A Redis command that arq does not use itself; tests of code that does need a Redis (or a stand-in) for it."""


class Keyspace:
    """Runs single Redis commands, and answers as redis-py would."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._values: dict[str, bytes | dict[str, float]] = {}
        self._ends: dict[str, int] = {}
        self._commands: dict[str, Callable[..., Any]] = {
            "DEL": self._del, "EXISTS": self._exists, "EXPIRE": self._expire, "GET": self._get, "INCRBY": self._incr,
            "KEYS": self._keys, "MGET": self._mget, "PEXPIRE": self._pexpire, "PSETEX": self._psetex,
            "PTTL": self._pttl, "SET": self._set, "SETEX": self._setex, "TIME": self._time, "ZADD": self._zadd,
            "ZCARD": self._zcard, "ZINCRBY": self._zincrby, "ZRANGE": self._zrange,
            "ZRANGEBYSCORE": self._zrangebyscore, "ZREM": self._zrem, "ZSCORE": self._zscore, "INFO": lambda *_: {},
            "PING": lambda: True, "PUBLISH": lambda *_: 0,
        }  # fmt: skip

    @property
    def now_ms(self) -> int:
        return self._clock.micros // 1000

    def run(self, command: Sequence[Any]) -> Any:
        """One command. Raises NotSimulated for one that arq does not use."""
        name = _text(command[0]).upper()
        found = self._commands.get(name)
        if found is None:
            raise NotSimulated(
                f"{name}: the Redis of this test is simulated, for what arq itself does. Give code that uses Redis for "
                "its own ends another client"
            )
        return found(*command[1:])

    def release(self, commands: Sequence[Command], claim: Claim) -> None:
        """A direct release: the commands with the job's values in place of the stand-ins."""
        values: dict[Payload, Any] = {
            Payload.BYTES: claim.payload,
            Payload.DUE_MS: claim.due // 1000,
            Payload.NOW_MS: self.now_ms,
            Payload.UNIQUE: claim.entry.hex(),
            Payload.ID: claim.id,
            Payload.DUE_ISO: from_micros(claim.due).isoformat(),
        }

        def word(one: Any) -> Any:
            if isinstance(one, Payload):
                return values[one]
            return "".join(_text(word(part)) for part in one) if isinstance(one, (list, tuple)) else one

        for first, *rest in commands:
            if first is Payload.UNLESS_EXISTS:
                if self._exists(word(rest[0])):
                    return
            else:
                self.run([first, *map(word, rest)])

    def ready(self, queue: str) -> list[tuple[str, int]]:
        """The members of a sorted set whose score, in milliseconds, has come; in order."""
        return [(one, int(score)) for one, score in self._sorted(queue) if score <= self.now_ms]

    def sorted_sets(self) -> list[str]:
        """Their names."""
        return [name for name, value in self._values.items() if isinstance(value, dict)]

    # ------------------------------------------------------------ strings

    def _value(self, key: Any) -> Any:
        name = _text(key)
        end = self._ends.get(name)
        if end is not None and end <= self.now_ms:
            self._values.pop(name, None)
            del self._ends[name]
        return self._values.get(name)

    def _put(self, key: Any, value: Any, end: int | None) -> bool:
        name = _text(key)
        self._values[name] = value if isinstance(value, bytes) else _text(value).encode()
        self._ends.pop(name, None)
        if end is not None:
            self._ends[name] = end
        return True

    def _get(self, key: Any) -> Any:
        return self._value(key)

    def _mget(self, *keys: Any) -> list[Any]:
        return [self._value(key) for key in keys]

    def _set(self, key: Any, value: Any, *options: Any) -> bool | None:
        words = [_text(word).upper() for word in options]
        if ("NX" in words and self._value(key) is not None) or ("XX" in words and self._value(key) is None):
            return None
        end = None
        for unit, factor, base in (
            ("EX", 1000, self.now_ms),
            ("PX", 1, self.now_ms),
            ("EXAT", 1000, 0),
            ("PXAT", 1, 0),
        ):
            if unit in words:
                end = base + int(words[words.index(unit) + 1]) * factor
        return self._put(key, value, end)

    def _setex(self, key: Any, seconds: Any, value: Any) -> bool:
        return self._put(key, value, self.now_ms + int(seconds) * 1000)

    def _psetex(self, key: Any, millis: Any, value: Any) -> bool:
        return self._put(key, value, self.now_ms + int(millis))

    def _incr(self, key: Any, amount: Any = 1) -> int:
        number = int(self._value(key) or 0) + int(amount)
        self._put(key, str(number), self._ends.get(_text(key)))
        return number

    def _exists(self, *keys: Any) -> int:
        return sum(self._value(key) is not None for key in keys)

    def _del(self, *keys: Any) -> int:
        found = self._exists(*keys)
        for key in keys:
            self._values.pop(_text(key), None)
            self._ends.pop(_text(key), None)
        return found

    def _expire(self, key: Any, seconds: Any) -> bool:
        return self._pexpire(key, int(seconds) * 1000)

    def _pexpire(self, key: Any, millis: Any) -> bool:
        if self._value(key) is None:
            return False
        self._ends[_text(key)] = self.now_ms + int(millis)
        return True

    def _pttl(self, key: Any) -> int:
        if self._value(key) is None:
            return -2
        end = self._ends.get(_text(key))
        return -1 if end is None else end - self.now_ms

    def _keys(self, pattern: Any = "*") -> list[bytes]:
        names = [name for name in list(self._values) if self._value(name) is not None]
        return [name.encode() for name in names if fnmatch.fnmatchcase(name, _text(pattern))]

    def _time(self) -> tuple[int, int]:
        return divmod(self._clock.micros, 1_000_000)

    # ------------------------------------------------------------ sorted sets

    def _members(self, key: Any, *, make: bool = False) -> dict[str, float]:
        found = self._value(key)
        if found is None:
            found = {}
            if make:
                self._values[_text(key)] = found
        return found  # type: ignore[no-any-return]  # a string under this key: no test of arq does that

    def _sorted(self, key: Any) -> list[tuple[str, float]]:
        return sorted(self._members(key).items(), key=lambda pair: (pair[1], pair[0]))

    def _zadd(self, key: Any, *words: Any) -> int:
        members, added = self._members(key, make=True), 0
        only_new = _text(words[0]).upper() == "NX"
        rest = words[1:] if only_new else words
        for score, member in zip(rest[::2], rest[1::2], strict=True):
            new = _text(member) not in members
            added += new
            if new or not only_new:
                members[_text(member)] = float(score)
        return added

    def _zrem(self, key: Any, *names: Any) -> int:
        members = self._members(key)
        found = [name for name in map(_text, names) if members.pop(name, None) is not None]
        if not members:
            self._values.pop(_text(key), None)
        return len(found)

    def _zscore(self, key: Any, member: Any) -> float | None:
        return self._members(key).get(_text(member))

    def _zcard(self, key: Any) -> int:
        return len(self._members(key))

    def _zincrby(self, key: Any, amount: Any, member: Any) -> float:
        members = self._members(key, make=True)
        members[_text(member)] = members.get(_text(member), 0.0) + float(amount)
        return members[_text(member)]

    def _zrange(self, key: Any, start: Any, end: Any, *options: Any) -> list[Any]:
        rows = self._sorted(key)
        last = len(rows) if int(end) == -1 else int(end) + 1
        return self._rows(rows[int(start) : last], options)

    def _zrangebyscore(self, key: Any, low: Any, high: Any, *options: Any) -> list[Any]:
        rows = [row for row in self._sorted(key) if float(low) <= row[1] <= float(high)]
        words = [_text(word).upper() for word in options]
        if "LIMIT" in words:
            at = words.index("LIMIT")
            offset, count = int(words[at + 1]), int(words[at + 2])
            rows = rows[offset:] if count < 0 else rows[offset : offset + count]
        return self._rows(rows, options)

    @staticmethod
    def _rows(rows: list[tuple[str, float]], options: Sequence[Any]) -> list[Any]:
        if any(_text(word).upper() == "WITHSCORES" for word in options):
            return [(name.encode(), score) for name, score in rows]
        return [name.encode() for name, _ in rows]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
