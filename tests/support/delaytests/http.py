"""Asking a process on the loopback, as Prometheus and Kubernetes do."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import NamedTuple

__all__ = ["Answer", "fetch", "port_told"]


class Answer(NamedTuple):
    status: int
    text: str
    kind: str


def fetch(port: int, path: str = "/metrics", *, accept: str = "") -> Answer:
    """What is answered, whatever the status."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return Answer(reply.status, reply.read().decode(), reply.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


def port_told(log: str) -> int | None:
    """The port that a log says metrics are served on; None: it says none."""
    found = re.search(r"metrics address=\S+?:(\d+) served", log)
    return int(found[1]) if found else None
