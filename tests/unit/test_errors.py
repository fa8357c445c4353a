"""The error tree is what its module's head draws, and every error survives a process boundary."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from redis import exceptions as rx

from delayadapters import errors
from delayadapters.errors import DelayError, JobExists, OutcomeUnknown, ReadOnlyReplica, RedisUnavailable
from delayadapters.redis.faults import translate

TREE = {
    "DelayError": "Exception",
    "JobExists": "DelayError",
    "PayloadTooLarge": "DelayError",
    "RecordUnreadable": "DelayError",
    "LeaseLost": "DelayError",
    "BrokerDown": "DelayError",
    "ReplicationTimeout": "DelayError",
    "RedisFault": "DelayError",
    "RedisUnavailable": "RedisFault",
    "OutcomeUnknown": "RedisUnavailable",
    "OutOfMemory": "RedisFault",
    "ReadOnlyReplica": "RedisFault",
    "WrongKeyType": "RedisFault",
    "PermissionDenied": "RedisFault",
    "ScriptFailed": "RedisFault",
}


def all_errors() -> list[type[DelayError]]:
    return [getattr(errors, name) for name in errors.__all__]


def test_the_tree():
    assert {cls.__name__: cls.__bases__[0].__name__ for cls in all_errors()} == TREE


def test_the_modules_head_draws_that_tree():
    parents: list[str] = []
    drawn: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^ {4}([│ ]*)(?:[├└]── )?([A-Z]\w+)\b", line):
            depth = 0 if "──" not in line else 1 + len(match[1]) // 4
            del parents[depth:]
            drawn[match[2]] = parents[-1] if parents else "Exception"
            parents.append(match[2])
    assert drawn == TREE


def test_all_is_complete_and_sorted():
    public = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, DelayError)}
    assert set(errors.__all__) == public
    assert list(errors.__all__) == sorted(errors.__all__)


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
def test_every_error_says_what_it_means(cls):
    assert cls.__doc__
    assert cls.__doc__.rstrip().endswith(".")


@pytest.mark.parametrize("name", ["PayloadTooLarge", "RecordUnreadable"])
def test_bad_values_are_value_errors_too(name):
    assert issubclass(getattr(errors, name), ValueError)


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_errors_cross_processes(cls, clone):
    error = cls(["a", "b"]) if cls is JobExists else cls("what happened")
    twin = clone(error)
    assert type(twin) is cls
    assert str(twin) == str(error)
    assert twin.__dict__ == error.__dict__


def test_job_exists_names_the_ids_and_the_way_out():
    error = JobExists(("a", "b"))
    assert error.ids == ["a", "b"]
    assert "'a', 'b'" in str(error)
    assert "if_exists=" in str(error)


def test_job_exists_stays_readable_with_many_ids():
    error = JobExists([f"id-{i}" for i in range(10_000)])
    assert len(error.ids) == 10_000
    assert len(str(error)) < 300
    assert "'id-4', …" in str(error)


@pytest.mark.parametrize(
    ("said", "otherwise"),
    [
        (rx.BusyLoadingError("Redis is loading the dataset in memory"), RedisUnavailable),
        (rx.ReadOnlyError("You can't write against a read only replica."), ReadOnlyReplica),
        (rx.ResponseError("READONLY You can't write against a read only replica. script: 0"), ReadOnlyReplica),
        (rx.MasterDownError("Link with MASTER is down"), RedisUnavailable),
        (rx.ResponseError("MASTERDOWN Link with MASTER is down"), RedisUnavailable),
        (rx.ClusterDownError("CLUSTERDOWN The cluster is down"), RedisUnavailable),
        (rx.ResponseError("NOREPLICAS Not enough good replicas to write."), RedisUnavailable),
        (rx.ResponseError("MISCONF Redis is configured to save RDB snapshots, but"), RedisUnavailable),
    ],
)
def test_a_server_that_refuses_after_an_attempt_that_may_have_been_carried_out(said, otherwise):
    """RedisUnavailable and ReadOnlyReplica say that nothing was stored."""
    first = translate(said, "schedule", [b"due"], maybe_done=False)
    assert type(first) is otherwise
    after = translate(said, "schedule", [b"due"], maybe_done=True)
    assert type(after) is OutcomeUnknown
    assert "same id" in str(after)
