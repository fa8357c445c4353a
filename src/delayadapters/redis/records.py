"""The packed record of a job: what is written into the ``entries`` hash, and how it is read back. No I/O.

====================  =====  =========================================================================================
flags                 1      high half: format version (1); 1 state, 2 meta, 4 commands, 8 a wrapped unreadable record
number                6      the entry's number; its lowest bit says in which field the record is
due                   7      microseconds since the epoch
sections              4 + n  as flagged, in this order: state, meta, commands; msgpack
payload               rest
====================  =====  =========================================================================================

Fourteen bytes before the payload keep a 300-byte payload in the allocator's 320-byte class. Number and due are filled
in by the script; :func:`pack` makes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from ..errors import RecordUnreadable
from ..jobs import Command, Payload

__all__ = ["RAW", "Packed", "Record", "Whole", "id_of", "pack", "take_apart", "unpack", "with_state"]

VERSION = 1
_STATE, _META, _DIRECT, RAW = 1, 2, 4, 8
_HEADER = 14
PLAIN = VERSION << 4


class Record(NamedTuple):
    """A record, parsed."""

    due: int
    payload: bytes
    meta: Mapping[str, str]
    attempts: int
    requeues: int
    reason: str | None


class Whole(NamedTuple):
    """Everything a record says, for moving it to another server.

    ``release``: the commands as stored, words as bytes, lists of words, and ints where :class:`Payload` stands in.
    ``done``: how many of them were carried out by an attempt that failed. ``raw``: the payload is a record that could
    not be read.
    """

    due: int
    payload: bytes
    meta: Mapping[str, str]
    release: Sequence[Sequence[Any]] | None
    attempts: int
    requeues: int
    reason: str | None
    done: int
    raw: bool


class Packed(tuple[Command, ...]):
    """Commands of a release that many jobs have alike, checked and packed once.

    Raises:
        TypeError: not a sequence of commands.
    """

    section: bytes

    def __new__(cls, release: Sequence[Command]) -> Packed:
        made = super().__new__(cls, release)
        made.section = _section([_words(command) for command in made], "release")
        return made


def pack(payload: bytes, meta: Mapping[str, str] | None, release: Sequence[Command] | None) -> tuple[int, bytes]:
    """The flags, and what follows number and due time.

    Raises:
        TypeError: release holds something else than what its type says.
        ValueError: release is empty.
    """
    if not meta and release is None:
        return PLAIN, payload
    flags, parts = PLAIN, []
    if meta:
        flags |= _META
        parts.append(_section(dict(meta), "meta"))
    if release is not None:
        if isinstance(release, (str, bytes)) or not isinstance(release, Sequence):
            raise TypeError(f"release must be a sequence of Redis commands, got {release!r}")
        if not release:
            raise ValueError("release must name at least one command: an empty one would make the job vanish")
        flags |= _DIRECT
        if isinstance(release, Packed):
            parts.append(release.section)
        else:
            parts.append(_section([_words(command) for command in release], "release"))
    parts.append(payload)
    return flags, b"".join(parts)


def unpack(raw: bytes) -> Record:
    """Parses a stored record.

    Raises:
        RecordUnreadable: not one of ours, or of a newer version.
    """
    if len(raw) >= _HEADER and raw[0] == PLAIN:
        return Record(int.from_bytes(raw[7:14], "big"), raw[14:], {}, 0, 0, None)
    if len(raw) < _HEADER or raw[0] >> 4 != VERSION:
        raise RecordUnreadable(
            f"unreadable record: {len(raw)} bytes beginning {raw[:8].hex()!r}; this version reads format {VERSION}"
        )
    flags, at = raw[0], _HEADER
    state: Sequence[Any] = (0, 0, b"", 0)
    meta: Mapping[str, str] = {}
    try:
        if flags & _STATE:
            section, at = _read(raw, at)
            state = msgpack.unpackb(section, raw=True)
        if flags & _META:
            section, at = _read(raw, at)
            meta = msgpack.unpackb(section)
        if flags & _DIRECT:
            _, at = _read(raw, at)
        attempts, requeues, reason = int(state[0]), int(state[1]), state[2].decode("utf-8", "replace") or None
    except Exception as error:  # whatever msgpack makes of bytes that are not its own
        raise RecordUnreadable(f"unreadable record: {error!r}") from error
    return Record(int.from_bytes(raw[7:14], "big"), raw[at:], meta, attempts, requeues, reason)


def take_apart(raw: bytes) -> Whole:
    """As :func:`unpack`, and the release commands with their state.

    Raises:
        RecordUnreadable: as there.
    """
    due, payload, meta, attempts, requeues, reason = unpack(raw)
    release, done, at = None, 0, _HEADER
    if raw[0] & _STATE:
        section, at = _read(raw, at)
        done = int(msgpack.unpackb(section, raw=True)[3])
    if raw[0] & _META:
        _, at = _read(raw, at)
    if raw[0] & _DIRECT:
        section, at = _read(raw, at)
        release = msgpack.unpackb(section, raw=True)
    return Whole(due, payload, meta, release, attempts, requeues, reason, done, bool(raw[0] & RAW))


def with_state(flags: int, tail: bytes, state: tuple[int, int, str, int]) -> tuple[int, bytes]:
    """What :func:`pack` made, with attempts, requeues, reason and commands done."""
    if state == (0, 0, "", 0):
        return flags, tail
    return flags | _STATE, _section(list(state), "state") + tail


def id_of(entry: bytes) -> str:
    """The id in an entry's name."""
    return entry[6:].decode("utf-8", "replace")


def _section(value: object, argument: str) -> bytes:
    # Redis's cmsgpack cannot read msgpack's bin type, so everything is packed as the raw type.
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=False)
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument} must be encodable as UTF-8, got {error.object!r}") from error
    return len(packed).to_bytes(4, "big") + packed


def _read(raw: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + int.from_bytes(raw[at : at + 4], "big")
    if end > len(raw):
        raise ValueError("a section is longer than the record")
    return raw[at + 4 : end], end


def _words(command: Command) -> list[Any]:
    if isinstance(command, (str, bytes)) or not isinstance(command, Sequence) or not command:
        raise TypeError(f"release must be a sequence of Redis commands, each a sequence of words; got {command!r}")
    guard = command[0] is Payload.UNLESS_EXISTS
    if any(word is Payload.UNLESS_EXISTS for word in command[1:]) or (guard and len(command) != 2):
        raise ValueError(f"release: a guard is (Payload.UNLESS_EXISTS, key), a command of its own; got {command!r}")
    return [_word(word) for word in command]


def _word(word: object) -> Any:
    if isinstance(word, Payload):
        return int(word)
    if isinstance(word, int) and not isinstance(word, bool):
        return str(word)
    if isinstance(word, (str, bytes)):
        return word
    if isinstance(word, (list, tuple)):
        return [_word(part) for part in word]
    raise TypeError(f"a word of a release command must be str, bytes, int, Payload or a list of those, got {word!r}")
