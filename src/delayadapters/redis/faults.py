"""redis-py's exceptions as ours: which class, and what to tell the user. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redis import exceptions as rx

from .. import errors

__all__ = ["RETRIABLE", "sent", "translate"]

RETRIABLE: Final = (rx.ConnectionError, rx.TimeoutError, rx.RedisClusterException, OSError, EOFError)
"""Worth another try with the same request: every request of ours may be repeated."""
_NEVER_SENT: Final = (
    "connecting",
    "connect call failed",
    "name or service",
    "too many connections",
    "no connection",
    "no master found",
)
_DOWN: Final = ("MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS")
_NO_LONGER: Final = ("LOADING", "loading the dataset", "READONLY", "read only replica", "MISCONF")
"""What a server says that takes no writes now, whatever it did before."""


def sent(error: BaseException) -> bool:
    """Whether the command may have reached Redis before this error."""
    if isinstance(error, (rx.BusyLoadingError, rx.AuthenticationError, rx.MaxConnectionsError)):
        return False
    text = str(error).lower()
    return not any(phrase in text for phrase in _NEVER_SENT)


def translate(error: BaseException, what: str, keys: Sequence[bytes], *, maybe_done: bool) -> errors.RedisFault:
    """What to raise from ``error``. ``what``: the operation; ``maybe_done``: an attempt may have been carried out."""
    text = str(error) or type(error).__name__
    where = f"{what} (keys {b' '.join(keys[:2]).decode(errors='replace')} …)" if keys else what
    # "unauthenticated multibulk length": what Redis says to a long command before a password.
    if isinstance(error, rx.AuthenticationError) or "NOAUTH" in text or "unauthenticated" in text:
        return errors.PermissionDenied(f"{where}: {text}; check the user and password in the Redis URL")
    down = isinstance(error, (rx.MasterDownError, rx.ClusterDownError)) or any(word in text for word in _DOWN)
    if maybe_done and (down or any(word in text for word in _NO_LONGER)):
        # A server that was restarted or has lost its role: what it did before may stand.
        return errors.OutcomeUnknown(
            f"{where}: an attempt before may have been carried out, and now Redis does not take it ({text}). "
            'If you try again, use the same id and if_exists="keep"'
        )
    if isinstance(error, rx.BusyLoadingError):
        return errors.RedisUnavailable(f"{where}: Redis is loading its data; try again when it has ({text})")
    if isinstance(error, RETRIABLE):
        if maybe_done:
            return errors.OutcomeUnknown(
                f"{where}: no answer from Redis ({text}); it may have been carried out. "
                'If you try again, use the same id and if_exists="keep"'
            )
        return errors.RedisUnavailable(
            f"{where}: Redis cannot be reached ({text}); check the URL, the server and the network"
        )
    if isinstance(error, rx.ReadOnlyError) or "READONLY" in text or "read only replica" in text:
        return errors.ReadOnlyReplica(f"{where}: the server is a read-only replica; connect to the primary ({text})")
    if isinstance(error, rx.OutOfMemoryError) or "OOM command" in text or text.startswith("OOM "):
        return errors.OutOfMemory(f"{where}: Redis has reached maxmemory; raise it or let the backlog drain ({text})")
    if (
        isinstance(error, rx.NoPermissionError)
        or "NOPERM" in text
        or "ACL failure" in text
        or "can't run this command" in text
    ):
        return errors.PermissionDenied(
            f"{where}: the ACL user lacks a right; docs/reference/acl.md lists them ({text})"
        )
    if "WRONGTYPE" in text:
        return errors.WrongKeyType(
            f"{where}: a key of this queue holds another type of value; choose another name= ({text})"
        )
    if "MISCONF" in text:
        return errors.RedisUnavailable(
            f"{where}: Redis cannot write to its disk and takes no commands; free space there ({text})"
        )
    if down:
        return errors.RedisUnavailable(f"{where}: Redis takes no commands now ({text})")
    return errors.ScriptFailed(f"{where}: {text}")
