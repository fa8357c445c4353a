"""What a server is found fault with; the replies are those of real servers."""

from __future__ import annotations

import logging

import pytest

from delayadapters import AsyncReleaser, Releaser
from delayadapters.checks import look
from delaytests import wait_until, wait_until_async

NOW = 1_900_000_000.0
CLOCK = (1_900_000_000, 0)
GOOD = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1, "role": "master"}


def codes(info=GOOD, save=None, clock=CLOCK):
    return [finding.code for finding in look((info, save, clock), NOW)]


def test_a_good_server():
    assert codes() == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "eviction"),
        ({"maxmemory_policy": "volatile-ttl"}, "eviction"),
        ({"redis_version": "6.0.16"}, "version"),
        ({"redis_version": "5.0.14"}, "version"),
        ({"role": "slave"}, "replica"),
    ],
)
def test_each_fault_is_found(change, code):
    assert codes({**GOOD, **change}) == [code]


@pytest.mark.parametrize("version", ["6.2.0", "7.2.4", "8.2.3", "10.0.1", "255.255.255"])
def test_versions_from_6_2_on_are_fine(version):
    assert codes({**GOOD, "redis_version": version}) == []


@pytest.mark.parametrize(
    ("save", "text"),
    [
        ({"save": ""}, "no persistence"),
        ({b"save": b""}, "no persistence"),
        ([b"save", b""], "no persistence"),
        ({"save": "3600 1 300 100"}, "snapshots only"),
        ([b"save", b"3600 1"], "snapshots only"),
    ],
)
def test_persistence(save, text):
    (finding,) = look(({**GOOD, "aof_enabled": 0}, save, CLOCK), NOW)
    assert finding.code == "persistence"
    assert text in finding.text
    assert "appendonly yes" in finding.text


@pytest.mark.parametrize(("seconds", "word"), [(2.5, "ahead of"), (-2.5, "behind")])
def test_a_clock_that_is_off(seconds, word):
    (finding,) = look((GOOD, None, CLOCK), NOW - seconds)
    assert finding.code == "clock"
    assert f"2.5 s {word}" in finding.text


def test_a_clock_within_a_second_is_fine():
    assert look((GOOD, None, CLOCK), NOW + 0.9) == []


def test_what_may_not_be_asked_is_no_fault():
    assert look((None, None, None), NOW) == []
    assert codes({**GOOD, "aof_enabled": 0}, save=None) == []


class Nothing:
    def publish(self, claims):
        return None


class NothingAsync:
    async def publish(self, claims):
        return None


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_starting_releaser_says_what_is_wrong(start_redis, caplog):
    from delayadapters import DelayQueue

    server = start_redis(args=["--maxmemory-policy", "allkeys-lru"])
    with Releaser(DelayQueue(server.client()), Nothing()):
        wait_until(lambda: any("allkeys-lru" in text for text in warnings(caplog)))
        wait_until(lambda: any("no persistence" in text for text in warnings(caplog)))


async def test_a_starting_async_releaser_says_what_is_wrong(start_redis, caplog):
    from delayadapters import AsyncDelayQueue

    server = start_redis(args=["--maxmemory-policy", "allkeys-lru"])
    async with AsyncReleaser(AsyncDelayQueue(server.async_client()), NothingAsync()):
        await wait_until_async(lambda: any("allkeys-lru" in text for text in warnings(caplog)))
        await wait_until_async(lambda: any("no persistence" in text for text in warnings(caplog)))


def test_a_server_that_may_not_be_asked_is_served_all_the_same(start_redis, caplog):
    from delayadapters import DelayQueue

    server = start_redis(args=["--maxmemory-policy", "allkeys-lru"])
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-info", "-config")
    queue = DelayQueue(server.client(username="plain", password="secret"))
    with Releaser(queue, Nothing()) as releaser:
        queue.schedule(b"x", delay=0)
        wait_until(lambda: releaser.stats.released == 1)
    assert "maxmemory-policy" not in " ".join(warnings(caplog))
