"""status, ls, show and queues."""

from __future__ import annotations

import json
import tracemalloc
from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import NewJob, Releaser
from delaytests import wait_until

from .conftest import invoke, kill_one

UTC = timezone.utc


def test_status_in_numbers(run, read, queue):
    for seconds in (30, 40, 600, 7200, 3 * 86_400, 30 * 86_400):
        queue.schedule(b"x", delay=seconds)
    queue.schedule(b"x", delay=0, id="leased")
    assert len(queue.claim()) == 1
    queue.schedule(b"x", delay=0)
    kill_one_keeping_due(queue)
    view = read("status")
    assert (view["queue"], view["waiting"], view["due"], view["leased"], view["dead"]) == (queue.name, 7, 1, 1, 1)
    assert view["falling_due"] == {
        "due now": 1,
        "next minute": 2,
        "next hour": 1,
        "next day": 1,
        "next week": 1,
        "later": 1,
    }
    assert datetime.fromisoformat(view["next_due"]) <= datetime.now(UTC)
    assert view["oldest_overdue"] > 0
    shown = run("status").stdout
    rows = dict(line.split(None, 1) for line in shown.splitlines() if line.startswith(("waiting", "dead", "queue")))
    assert rows == {"queue": queue.name, "waiting": "7", "dead": "1"}
    bars = {line[:16].strip(): line[16:].split() for line in shown.splitlines() if line.startswith("next ")}
    assert [bars[f"next {span}"][0] for span in ("minute", "hour", "day", "week")] == ["2", "1", "1", "1"]
    assert len(bars["next minute"][1]) // 2 == len(bars["next hour"][1])


def kill_one_keeping_due(queue):
    """A dead job; the due one stays unclaimed."""
    other = queue.claim()
    assert queue.give_back(other) == 1
    queue.schedule(b"x", delay=0, id="dead")
    for claim in queue.claim():
        if claim.id == "dead":
            queue.fail([claim], "bad", retry_in=None)
        else:
            queue.give_back([claim])


class Nothing:
    def publish(self, claims):
        return None


def test_status_shows_the_release_loops_and_how_late_they_were(run, read, queue):
    assert read("status")["loops"] == []
    assert "none: nothing is released" in run("status").stdout
    with Releaser(queue, Nothing(), name="host-1:worker") as releaser:
        queue.schedule_many(NewJob(b"x", delay=0) for _ in range(20))
        wait_until(lambda: releaser.stats.released == 20)
        view = wait_until(lambda: (view := read("status"))["loops"] and view["lateness"]["released"] == 20 and view)
        shown = run("status").stdout
    [loop] = view["loops"]
    assert loop["name"] == "host-1:worker"
    assert loop["alive"]
    assert 0 <= loop["seen_ago"] < 45
    assert view["counters"]["released"] == 20
    assert 0 < view["lateness"]["p50"] <= view["lateness"]["p99"]
    assert "half of 20 ≤" in shown
    assert "host-1:worker" in shown


def test_an_empty_queue_points_to_the_others(run):
    result = run("status")
    assert result.exit_code == 0
    assert "delayadapters queues" in result.stderr


def test_more_shards_than_told_are_told_of(redis_server, make_queue, run, queue_name):
    queue = make_queue(shards=3)
    queue.schedule_many(NewJob(b"x", delay=60) for _ in range(30))
    assert "more than 1 shards" in run("status").stdout
    with_all = invoke("--url", redis_server.url, "--name", queue_name, "--shards", "3", "status", "--json")
    view = json.loads(with_all.stdout)
    assert view["waiting"] == 30
    assert "warning" not in view


# ------------------------------------------------------------------------------------------------------------------ ls


@pytest.fixture
def ten(queue):
    for n in range(10):
        task = "shop.tasks.remind" if n % 3 == 0 else "shop.other"
        queue.schedule(b"x", delay=100 + n * 100, id=f"id-{n}", meta={"task": task})
    return queue


def test_ls_filters(ten, read):
    def ids(*arguments):
        return [job["id"] for job in read("ls", *arguments)["jobs"]]

    assert ids() == [f"id-{n}" for n in range(10)]
    assert ids("--name", "shop.tasks.*") == ids("--task", "*remind") == ["id-0", "id-3", "id-6", "id-9"]
    assert ids("--name", "shop.tasks.remind", "--due-after", "5m") == ["id-3", "id-6", "id-9"]
    assert ids("--due-before", "350") == ["id-0", "id-1", "id-2"]
    assert ids("--due-after", "250", "--due-before", "450s") == ["id-2", "id-3"]
    at = (datetime.now(UTC) + timedelta(seconds=850)).isoformat()
    assert ids("--due-after", at) == ["id-8", "id-9"]
    assert ids("--id-prefix", "id-1") == ["id-1"]
    assert ids("--id-prefix", "x") == []


@pytest.mark.parametrize("filters", [(), ("--name", "*e*"), ("--id-prefix", "id")])
def test_ls_pages(ten, read, run, filters):
    seen, cursor = [], []
    while True:
        page = read("ls", "--limit", "3", *filters, *cursor)
        seen += [job["id"] for job in page["jobs"]]
        assert len(page["jobs"]) <= 3
        if page["cursor"] is None:
            break
        cursor = ["--cursor", page["cursor"]]
    assert seen == [f"id-{n}" for n in range(10)]
    assert "more: ls --cursor" in run("ls", "--limit", "3", *filters).stderr


def test_ls_of_ids_is_for_pipes(queue, run):
    long = "x" * 300
    queue.schedule(b"x", delay=60, id=long)
    queue.schedule(b"x", delay=70, id="b")
    assert run("ls", "--ids").stdout == f"{long}\nb\n"
    assert run("ls", "--name", "none").stdout == "no jobs\n"
    assert run("ls", "--name", "none", "--ids").stdout == ""


def test_what_comes_from_elsewhere_does_not_steer_the_terminal(queue, run):
    queue.schedule(b"x", delay=60, id="a\x1b[31m", meta={"task": "t\x1b]0;title\x07"})
    kill_one(queue, "b", "no \x1b[2J exchange")
    for arguments in (["ls"], ["dead", "ls"], ["show", "b"], ["show", "a\x1b[31m"], ["cancel", "a\x1b[31m"]):
        assert "\x1b" not in run(*arguments).output


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "--cursor", "!", 1),
        ("ls", "--limit", "0", 2),
        ("ls", "--due-before", "yesterday", 2),
        ("nothing", 2),
        ("show", 2),
    ],
)
def test_wrong_usage(run, arguments):
    *words, code = arguments
    assert run(*words).exit_code == code


# ---------------------------------------------------------------------------------------------------------------- show


def test_show(queue, run, read):
    queue.schedule(b'{"to": "x"}', delay=60, id="a", meta={"task": "t", "queue": "q", "tenant": "acme"})
    view = read("show", "a")
    assert (view["id"], view["task"], view["queue"], view["state"]) == ("a", "t", "q", "waiting")
    assert view["meta"] == {"tenant": "acme"}
    assert (view["payload"], view["bytes"]) == ('{"to": "x"}', 11)
    shown = run("show", "a").stdout
    assert '{"to": "x"}' in shown
    assert "acme" in shown


def test_show_of_a_payload_that_is_no_text(queue, read):
    queue.schedule(bytes(range(256)) * 4, delay=60, id="a")
    view = read("show", "a")
    assert view["payload"].startswith("00 01 02")
    assert view["payload"].endswith("…")


def test_show_of_a_dead_and_of_a_missing_one(queue, run, read):
    kill_one(queue, "a")
    assert read("dead", "show", "a")["reason"] == "no exchange 'x'"
    missing = run("show", "b")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "no such job" in missing.stderr
    missing = run("show", "b", "--json")
    assert (missing.exit_code, json.loads(missing.stdout)) == (1, None)


# -------------------------------------------------------------------------------------------------------------- queues


def test_queues_finds_names_and_shards(redis_server, make_queue, redis_client):
    for name, shards, jobs in (("delayadapters:celery:redis:0", 1, 2), ("shop:arq", 2, 12)):
        make_queue(name=name, shards=shards).schedule_many(NewJob(b"", delay=60) for _ in range(jobs))
    redis_client.set("{other:0}:thing", 1)
    redis_client.set("due", 1)
    found = invoke("--url", redis_server.url, "queues", "--json")
    redis_client.delete("{other:0}:thing", "due")
    rows = {view["name"]: (view["shards"], view["waiting"]) for view in json.loads(found.stdout)}
    assert rows == {"delayadapters:celery:redis:0": (1, 2), "shop:arq": (2, 12)}
    assert "shop:arq" in invoke("--url", redis_server.url, "queues").stdout


def test_no_queues(redis_server):
    assert invoke("--url", redis_server.url, "queues").stdout == "no delay queues on this Redis\n"


@pytest.mark.parametrize("filters", [(), ("--name", "t")])
@pytest.mark.parametrize("listing", [("ls",), ("dead", "ls")])
def test_a_listing_keeps_no_payload(queue, run, read, listing, filters):
    """Whatever the limit is, it holds about a script's answer of them, a megabyte, at once."""
    queue.schedule_many(NewJob(b"x" * 500_000, delay=0, id=f"{n:02}", meta={"task": "t"}) for n in range(60))
    if listing[0] == "dead":
        while claims := queue.claim(100):
            queue.fail(claims, "no", retry_in=None)
    run(*listing, *filters)  # imports
    tracemalloc.start()
    try:
        page = read(*listing, *filters, "--limit", "10000")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [job["id"] for job in page["jobs"]] == [f"{n:02}" for n in range(60)]
    assert most < 12_000_000, "30 MB were listed"
