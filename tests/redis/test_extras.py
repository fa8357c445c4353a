"""What an adapter can add to a schedule call, and to the commands of a direct release."""

from __future__ import annotations

import pytest

from delayadapters import JobExists, Outcome, Payload
from delayadapters.redis import records
from delayadapters.redis.commands import Extras


def schedule(queue, payload, id, extras, if_exists="error", release=None):
    return queue._run(queue._verbs.schedule(payload, 0, None, id, None, if_exists, release, extras))


@pytest.fixture
def key(queue_name, redis_client):
    yield f"{queue_name}-key"
    redis_client.delete(f"{queue_name}-key")


def test_expect_stores_only_when_every_command_answers_so(queue, redis_client, key):
    redis_client.zadd(key, {"member": 1764000000123})
    score = (("ZSCORE", key, "member"), "1764000000123")
    absent = (("ZSCORE", key, "nobody"), "")
    with pytest.raises(JobExists):
        schedule(queue, b"x", "job", Extras(expect=[score, (("ZCARD", key), "2")], alongside=[("DEL", key)]))
    assert queue.get("job") is None
    assert redis_client.exists(key)

    schedule(queue, b"x", "job", Extras(expect=[score, absent, (("ZCARD", key), "1")], alongside=[("DEL", key)]))
    assert queue.get("job").payload == b"x"
    assert not redis_client.exists(key)


def test_expect_answers_an_error_of_its_command(queue, redis_client, key):
    redis_client.set(key, "a string")
    with pytest.raises(Exception, match=r"another type|WRONGTYPE"):
        schedule(queue, b"x", "job", Extras(expect=[(("ZSCORE", key, "member"), "1")]))
    assert queue.get("job") is None


@pytest.mark.parametrize("leased", [False, True])
def test_distinct_by_a_field_of_the_meta(queue, leased):
    def attempt(payload, **meta):
        extras = Extras(distinct="attempt")
        return queue._run(queue._verbs.schedule(payload, 0, None, "job", meta or None, "add", None, extras)).outcome

    assert attempt(b"1", attempt="1", trace="a") is Outcome.SCHEDULED
    if leased:
        queue.fail(queue.claim(), "so that the record has a state", retry_in=0)
        assert len(queue.claim()) == 1
    assert attempt(b"another trace", attempt="1", trace="b") is Outcome.KEPT
    assert attempt(b"2", attempt="2", trace="a") is Outcome.SCHEDULED
    assert attempt(b"no meta") is Outcome.SCHEDULED
    assert attempt(b"no meta") is Outcome.SCHEDULED
    assert attempt(b"other field", trace="a") is Outcome.SCHEDULED


def test_the_id_in_a_direct_release(queue, redis_client, key):
    schedule(queue, b"x", "job-1", Extras(), release=[("SADD", key, Payload.ID, ["id:", Payload.ID])])
    queue.claim()
    assert redis_client.smembers(key) == {b"job-1", b"id:job-1"}


def test_a_publish_that_is_refused_is_no_failed_release(queue, redis_client, key):
    """The job is in its broker; who waits for the message finds it at the next poll."""
    release = [("PUBLISH", "too", "many", "words"), ("LPUSH", key, Payload.BYTES)]
    schedule(queue, b"x", "job-1", Extras(), release=release)
    queue.claim()
    assert redis_client.lrange(key, 0, -1) == [b"x"]
    assert queue.stats().waiting == 0


def test_packed_commands_are_the_same_record():
    release = [("SADD", "key", Payload.ID), ("LPUSH", ["a", "b"], Payload.BYTES)]
    assert records.pack(b"x", {"a": "b"}, records.Packed(release)) == records.pack(b"x", {"a": "b"}, release)
    with pytest.raises(TypeError, match="release"):
        records.Packed(["SADD key"])
