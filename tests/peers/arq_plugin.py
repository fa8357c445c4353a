"""pytest plugin for arq's own tests: a Redis server for their container and, with ARQ_SUITE=ours, our classes."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from delaytests import RedisServer


class RedisContainer:
    """As much of testcontainers' as arq's conftest uses."""

    port = 6379

    def __init__(self, image: str) -> None:
        self._server = RedisServer(aof="no")  # persistent, else the release loop warns, into logs that tests compare

    def __enter__(self) -> RedisContainer:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def get_container_host_ip(self) -> str:
        return self._server.host

    def get_exposed_port(self, port: int) -> int:
        return self._server.port


def put(name: str, **values: Any) -> None:
    module = sys.modules.get(name) or ModuleType(name)
    sys.modules[name] = module
    for key, value in values.items():
        setattr(module, key, value)


put("testcontainers")
put("testcontainers.redis", RedisContainer=RedisContainer)

if os.environ.get("ARQ_SUITE") == "ours":
    from delayadapters.arq import DelayArqRedis, DelayJob, DelayWorker, create_pool, create_worker, run_worker
    from delayadapters.arq.command import arq as command

    put("arq", ArqRedis=DelayArqRedis, Worker=DelayWorker, create_pool=create_pool, run_worker=run_worker)
    put("arq.connections", ArqRedis=DelayArqRedis, create_pool=create_pool)
    put("arq.jobs", Job=DelayJob)
    put("arq.worker", Worker=DelayWorker, create_worker=create_worker, run_worker=run_worker)
    put("arq.cli", cli=command)
