"""Loaded into taskiq's own tests (``pytest -p taskiq_plugin``): every broker they make has a DelayMiddleware."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from typing import Any

from taskiq import AsyncBroker
from taskiq.brokers.shared_broker import AsyncSharedBroker

from delaytests import RedisServer

if os.environ["TASKIQ_SUITE"] == "ours":
    from delayadapters.taskiq import DelayMiddleware

    server = RedisServer().start()
    atexit.register(server.close)
    numbers = itertools.count(1)
    plain = AsyncBroker.__init__

    @functools.wraps(plain)
    def init(self: AsyncBroker, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        if not isinstance(self, AsyncSharedBroker) and type(self).__name__ != "ZeroMQBroker":
            # A name of its own: what the default is made from is not there yet in a base class's __init__.
            self.add_middlewares(DelayMiddleware(server.url, name=f"suite-{next(numbers)}"))

    AsyncBroker.__init__ = init  # type: ignore[method-assign]
