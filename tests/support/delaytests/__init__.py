"""Helpers of the tests; tests/conftest.py makes fixtures of them. pyproject.toml's ``pythonpath`` finds it."""

from .binaries import default_binary, redis_binaries
from .clock import FakeClock
from .counting import Commands, Messages, count_commands, count_messages
from .proxy import Cut, CuttableProxy
from .server import RedisServer, Tls
from .waiting import wait_until, wait_until_async

__all__ = [
    "Commands",
    "Cut",
    "CuttableProxy",
    "FakeClock",
    "Messages",
    "RedisServer",
    "Tls",
    "count_commands",
    "count_messages",
    "default_binary",
    "redis_binaries",
    "wait_until",
    "wait_until_async",
]
