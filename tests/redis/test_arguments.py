"""Arguments that only a queue in Redis has: a bad one is refused at once, by name."""

from __future__ import annotations

import pytest

from delayadapters import AsyncReleaser, DelayQueue, Payload, Releaser


@pytest.mark.parametrize("value", ["1", 0, -1, True], ids=str)
def test_wait_timeout(redis_client, value):
    with pytest.raises(ValueError, match="wait_timeout"):
        DelayQueue(redis_client, wait_replicas=1, wait_timeout=value)


@pytest.mark.parametrize("release", [5, "LPUSH list x", b"LPUSH", [5], ["LPUSH list x"], [()]], ids=repr)
def test_release_that_is_no_sequence_of_commands(queue, release):
    with pytest.raises(TypeError, match="release"):
        queue.schedule(b"x", delay=1, release=release)


@pytest.mark.parametrize(
    "command",
    [(Payload.UNLESS_EXISTS,), (Payload.UNLESS_EXISTS, "a", "b"), ("SET", "a", Payload.UNLESS_EXISTS)],
    ids=["no key", "two keys", "not first"],
)
def test_a_guard_that_is_none(queue, command):
    with pytest.raises(ValueError, match="guard"):
        queue.schedule(b"x", delay=1, release=[command])


def test_a_release_that_is_not_encodable(queue):
    with pytest.raises(ValueError, match="release"):
        queue.schedule(b"x", delay=1, release=[("SET", "a", "\ud800")])


@pytest.mark.parametrize("kind", [Releaser, AsyncReleaser])
def test_a_publisher_that_cannot_publish(queue, kind):
    with pytest.raises(TypeError, match="publisher"):
        kind(queue, object())
