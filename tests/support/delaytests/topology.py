"""Servers that are more than one plain Redis: a cluster of one node, a Sentinel with its primary."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import redis

from .server import RedisServer, free_port
from .waiting import wait_until

__all__ = ["Sentinel", "cluster_of_one", "cluster_port"]


def cluster_port() -> int:
    """A free port that leaves room for the cluster's bus, 10,000 ports above."""
    while (port := free_port()) > 55535:
        pass
    return port


def cluster_of_one(server: RedisServer) -> RedisServer:
    """Gives a started ``--cluster-enabled yes`` server every slot; waits until it takes commands."""
    client = server.client()
    client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
    wait_until(lambda: b"cluster_state:ok" in _raw_info(client))
    return server


def _raw_info(client: redis.Redis) -> bytes:
    answer: Any = client.execute_command("CLUSTER INFO", NEVER_DECODE=True)
    if isinstance(answer, dict):
        return f"cluster_state:{answer['cluster_state']}".encode()
    return answer if isinstance(answer, bytes) else str(answer).encode()


class Sentinel:
    """One Sentinel that watches ``primary`` under the name ``mine``; a context manager.

    ``down_after``: milliseconds of silence after which it puts a replica in the primary's place.
    """

    name = "mine"

    def __init__(self, primary: RedisServer, binary: Path, *, down_after: int = 60_000) -> None:
        self.port = free_port()
        config = primary.folder / f"sentinel-{self.port}.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {primary.folder}\n"
            f"sentinel monitor {self.name} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {self.name} {down_after}\n"
        )
        self._command = [str(binary), str(config), "--sentinel"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sentinel:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(self._answers)
        return self

    def _answers(self) -> bool:
        with redis.Redis(port=self.port, socket_timeout=2) as probe:
            try:
                return bool(probe.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name))
            except redis.exceptions.ConnectionError:
                return False

    def primary(self) -> int:
        """The port of the server that it names as the primary."""
        with redis.Redis(port=self.port, socket_timeout=2) as probe:
            answer: Any = probe.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
            return int(answer[1])

    def replicas(self) -> int:
        """How many replicas it has found."""
        with redis.Redis(port=self.port, socket_timeout=2) as probe:
            answer: Any = probe.execute_command("SENTINEL", "REPLICAS", self.name)
            return len(answer)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
