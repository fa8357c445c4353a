"""cancel, reschedule, release-now and dead: ids, lists of ids, filters; in batches that no other client feels."""

from __future__ import annotations

import json
import os
import signal
from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import DelayQueue, NewJob, Outcome, Published, Releaser, State
from delayadapters.redis import steering
from delaytests import count_commands, count_messages, wait_until
from delaytests.raw import keys_of

from .conftest import fill_fast, invoke, kill_one

UTC = timezone.utc


@pytest.fixture
def four(queue):
    for n, id in enumerate("abcd"):
        queue.schedule(b"x", delay=60 + n, id=id, meta={"task": "odd" if n % 2 else "even"})
    return queue


def waiting(queue):
    return [job.id for job in queue.jobs(limit=1000).jobs]


# ----------------------------------------------------------------------------------------------------------------- ids


def test_cancel_one(four, run):
    assert run("cancel", "a").stdout == "a  cancelled\n"
    again = run("cancel", "a")
    assert again.exit_code == 1
    assert "no such job" in again.stdout
    assert waiting(four) == ["b", "c", "d"]


def test_several_are_asked_for(four, run):
    refused = run("cancel", "b", "c", input="n\n")
    assert refused.exit_code == 1
    assert len(waiting(four)) == 4
    assert run("cancel", "b", "c", "b", input="y\n").exit_code == 0
    done = run("cancel", "d", "x", "--yes", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == [{"id": "d", "outcome": "cancelled"}, {"id": "x", "outcome": "not_found"}]
    assert waiting(four) == ["a"]


def test_ids_from_standard_input(four, run):
    listed = run("ls", "--ids", "--name", "odd").stdout
    asked = run("cancel", "-", input=listed)
    assert asked.exit_code == 2
    assert "--yes" in asked.stderr
    assert run("cancel", "-", "--dry-run", input=listed).stdout.endswith("dry run: 2 jobs would be cancelled\n")
    assert run("cancel", "-", "--yes", input=listed).stdout == "b  cancelled\nd  cancelled\n"
    assert run("cancel", "-", "--yes", input="\r\na\r\n\n").exit_code == 0
    assert waiting(four) == ["c"]
    assert run("cancel", "-", "--yes", input="").exit_code == 0


def test_what_is_being_released_is_too_late(queue, run):
    queue.schedule(b"x", delay=0, id="a")
    claims = queue.claim()
    said = run("cancel", "a")
    assert said.exit_code == 1
    assert "in_flight: being released right now" in said.stdout
    queue.ack(claims)
    assert "released: already released" in run("cancel", "a").stdout


def test_reschedule(four, run):
    def due(id):
        return four.get(id).due_at

    assert run("reschedule", "a", "--delay", "1000").stdout == "a  rescheduled\n"
    assert due("a") > datetime.now(UTC) + timedelta(seconds=900)
    assert run("reschedule", "a", "--delay", "1.5h").exit_code == 0
    assert due("a") > datetime.now(UTC) + timedelta(seconds=5000)
    assert run("reschedule", "a", "b", "--yes", "--at", "2100-01-01T00:00:00").exit_code == 0
    assert due("a") == due("b") == datetime(2100, 1, 1, tzinfo=UTC)
    assert run("release-now", "a").exit_code == 0
    assert due("a") <= datetime.now(UTC) + timedelta(seconds=1)
    assert run("release-now", "x").exit_code == 1
    for wrong in ([], ["--delay", "1", "--at", "1h"], ["--at", "soon"], ["--delay", "nan"], ["--delay", "-5"]):
        assert run("reschedule", "b", *wrong).exit_code == 2
    assert run("reschedule", "b", "--delay", "99999w").exit_code == 1


@pytest.mark.parametrize("verb", [("cancel",), ("release-now",), ("dead", "replay"), ("dead", "discard")])
def test_either_ids_or_a_filter(four, run, verb):
    for wrong in ([], ["a", "--all"], ["a", "--name", "x"], ["--all", "--id-prefix", "x"]):
        assert run(*verb, "--yes", *wrong).exit_code == 2
    assert len(waiting(four)) == 4


def test_a_dry_run_changes_nothing(four, run):
    kill_one(four, "e")
    before = four.jobs().jobs
    assert (
        run("cancel", "a", "x", "--dry-run").stdout == "a  waiting\nx  not_found\ndry run: 1 job would be cancelled\n"
    )
    assert "4 jobs would be made due now" in run("release-now", "--all", "--dry-run").stdout
    said = json.loads(run("cancel", "--name", "odd", "--dry-run", "--json").stdout)
    assert (said["matched"], [job["id"] for job in said["first"]]) == (2, ["b", "d"])
    assert run("dead", "replay", "--all", "--dry-run").exit_code == 0
    assert four.jobs().jobs == before
    assert four.stats().dead == 1


# -------------------------------------------------------------------------------------------------------------- filter


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["--name", "odd"], "ac"),
        (["--name", "o*", "--due-before", "62.5"], "acd"),
        (["--id-prefix", "a"], "bcd"),
        (["--due-after", "61.5"], "ab"),
        (["--all"], ""),
        (["--name", "none"], "abcd"),
    ],
)
def test_cancel_by_filter(four, run, filters, left):
    result = run("cancel", *filters, "--yes")
    assert result.exit_code == 0
    count = 4 - len(left)
    assert result.stdout == f"{count} job{'' if count == 1 else 's'} cancelled\n"
    assert waiting(four) == list(left)


def test_a_filter_asks_with_the_number(four, run):
    refused = run("cancel", "--name", "odd", input="n\n")
    assert "Cancel 2 jobs?" in refused.stderr
    assert refused.exit_code == 1
    assert len(waiting(four)) == 4
    assert run("cancel", "--name", "odd", input="y\n").exit_code == 0
    assert waiting(four) == ["a", "c"]


def test_a_filter_means_entries_not_ids(queue, run):
    """Of an id that waits twice, only what matches goes."""
    queue.schedule(b"soon", delay=60, id="a")
    queue.schedule(b"late", delay=6000, id="a", if_exists="add")
    assert run("cancel", "--due-before", "10m", "--yes").stdout == "1 job cancelled\n"
    assert [job.payload for job in queue.jobs().jobs] == [b"late"]


def test_reschedule_by_filter_meets_no_job_twice(queue, run):
    """All land on one instant, further on in the queue; and those that were there stay in their order."""
    at = datetime(2100, 1, 1, tzinfo=UTC)
    queue.schedule_many(NewJob(b"", delay=60 + n, id=f"{n:04}", meta={"task": "t"}) for n in range(1200))
    queue.schedule(b"", at=at, id="last", meta={"task": "t"})
    assert run("reschedule", "--name", "t", "--at", at.isoformat(), "--yes").stdout == "1,200 jobs rescheduled\n"
    assert {job.due_at for job in queue.jobs(limit=10_000).jobs} == {at}
    assert [job.id for job in queue.jobs(limit=10_000).jobs] == [*(f"{n:04}" for n in range(1200)), "last"]
    assert run("reschedule", "--name", "t", "--at", at.isoformat(), "--yes").stdout == "0 jobs rescheduled\n"
    assert run("reschedule", "--all", "--delay", "1h", "--yes").stdout == "1,201 jobs rescheduled\n"


def test_release_now_by_filter_leaves_what_is_due(queue, run):
    queue.schedule(b"", delay=0, id="due")
    before = queue.get("due")
    queue.schedule_many(NewJob(b"", delay=60, id=f"{n}") for n in range(250))
    assert run("release-now", "--all", "--yes").stdout == "250 jobs made due now\n"
    assert queue.stats().due == 251
    assert queue.get("due") == before


def test_an_earlier_due_time_wakes_the_loops(queue, run, redis_client):
    queue.schedule(b"", delay=600, id="a", meta={"task": "t"})
    with count_messages(redis_client, f"{{{queue.name}:*}}:wake") as heard:
        run("reschedule", "--name", "t", "--delay", "30", "--yes")
        assert len(heard) == 1
        run("release-now", "a")
        assert len(heard) == 2
        run("reschedule", "a", "--delay", "3000")
        assert len(heard) == 2


def test_jobs_that_go_meanwhile_are_no_failure(queue, run, monkeypatch):
    queue.schedule_many(NewJob(b"", delay=60, id=f"{n}") for n in range(5))
    real = steering.steer_rows

    def late(*arguments):
        queue.cancel("3")
        queue.release_now("4")
        assert len(queue.claim()) == 1
        return real(*arguments)

    monkeypatch.setattr(steering, "steer_rows", late)
    result = run("cancel", "--all", "--yes")
    assert result.exit_code == 0
    assert result.stdout == "3 jobs cancelled; 1 gone meanwhile; 1 being released meanwhile\n"


def test_shards(redis_server, make_queue, queue_name):
    queue = make_queue(shards=3)
    queue.schedule_many(NewJob(b"", delay=60 + n, id=f"{n}", meta={"task": "t"}) for n in range(700))
    given = ("--url", redis_server.url, "--name", queue_name, "--shards", "3")
    assert invoke(*given, "cancel", "--id-prefix", "1", "--yes").stdout == "111 jobs cancelled\n"
    assert invoke(*given, "reschedule", "--all", "--delay", "5h", "--yes").stdout == "589 jobs rescheduled\n"
    assert queue.stats().waiting == 589


# ---------------------------------------------------------------------------------------------------------------- dead


def test_dead(queue, run, read):
    for id in "abc":
        kill_one(queue, id, "no \x1b[31m exchange " + "y" * 100)
    kill_one(queue, "d", "timed out")
    page = read("dead", "ls", "--limit", "2")
    assert [job["id"] for job in page["jobs"]] == ["a", "b"]
    page = read("dead", "ls", "--cursor", page["cursor"])
    assert [job["id"] for job in page["jobs"]] == ["c", "d"]
    assert run("dead", "ls", "--ids", "--reason", "timed*").stdout == "d\n"
    assert "no such job" in run("dead", "replay", "x").stdout
    assert run("dead", "replay", "a").stdout == "a  replayed\n"
    assert run("dead", "discard", "b", "--yes").stdout == "b  discarded\n"
    assert run("dead", "discard", "b").exit_code == 1
    assert run("dead", "discard", "--reason", "no*", "--yes").stdout == "1 job discarded\n"
    assert run("dead", "replay", "--name", "shop.*", "--yes").stdout == "1 job replayed\n"
    job = queue.get("d")
    assert (job.state, job.attempts, job.reason) == (State.WAITING, 0, None)
    stats = queue.stats()
    assert (stats.waiting, stats.dead) == (2, 0)


class Refuses:
    """A publisher to which every job is bad."""

    def publish(self, batch):
        return Published(failed={claim.entry: "no" for claim in batch})


def dead_ones(queue, count):
    queue.schedule_many(NewJob(b"x", delay=0, id=f"{n:04}", meta={"task": "t"}) for n in range(count))
    while claims := queue.claim(1000):
        queue.fail(claims, "no", retry_in=None)
    assert queue.stats().dead == count


def of_another_version(queue, count):
    """Jobs that are dead as soon as anybody claims them."""
    queue.schedule_many(NewJob(b"x", delay=0, id=f"{n:04}") for n in range(count))
    entries = keys_of(queue).entries
    queue.client.hset(entries, mapping={f"{n:04}": b"\xf0 newer version" for n in range(count)})
    while queue.stats().due:
        assert queue.claim(1000) == []
    assert queue.stats().dead == count


@pytest.mark.parametrize("make", [dead_ones, of_another_version])
@pytest.mark.parametrize("by", [("--all",), ("--reason", "*")])
def test_replaying_the_dead_ends_though_they_die_again(queue, run, monkeypatch, make, by):
    """They come up again behind the others, and are let lie."""
    make(queue, 620)
    real = steering.steer_rows

    def all_dead_again(*arguments):
        said = yield from real(*arguments)
        wait_until(lambda: queue.stats().dead == 620)
        return said

    monkeypatch.setattr(steering, "steer_rows", all_dead_again)
    with Releaser(queue, Refuses(), max_attempts=1):
        assert run("dead", "replay", *by, "--yes").stdout == "620 jobs replayed\n"
    assert queue.counters().replayed == 620
    assert queue.stats().dead == 620


def test_discarding_the_dead_ends_though_others_die(queue, run, monkeypatch):
    """Those who die after the call began are not what was asked for."""
    dead_ones(queue, 620)
    real = steering.steer_rows

    def more_die(verbs, verb, rows, at):
        said = yield from real(verbs, verb, rows, at)
        for n in range(len(rows)):
            queue.schedule(b"x", delay=0, id=f"later-{queue.counters().scheduled}-{n}")
        queue.fail(queue.claim(1000), "no", retry_in=None)
        return said

    monkeypatch.setattr(steering, "steer_rows", more_die)
    assert run("dead", "discard", "--all", "--yes").stdout == "620 jobs discarded\n"
    assert queue.stats().dead == 620
    assert all(job.id.startswith("later") for job in queue.dead_jobs(limit=1000).jobs)


# ------------------------------------------------------------------------------------------------ batches and Ctrl-C


def fill(queue: DelayQueue, count: int) -> None:
    queue.schedule_many(NewJob(b"x" * 100, delay=3600 + n % 5000, meta={"task": "t"}) for n in range(count))


@pytest.mark.parametrize(
    ("verb", "done"), [(("cancel",), "cancelled"), (("reschedule", "--delay", "9h"), "rescheduled")]
)
def test_work_is_done_in_batches(queue, run, redis_client, verb, done):
    """A script looks at 200 jobs or changes 100. (What another client feels of it: benchmarks/steering.py.)"""
    fill(queue, 3000)
    redis_client.config_resetstat()
    with count_commands(redis_client) as counted:
        assert run(*verb, "--name", "t", "--yes").stdout == f"3,000 jobs {done}\n"
    # Moved jobs are seen once more, further on.
    bounded(counted, jobs=3000, passes=2 if verb[0] == "reschedule" else 1)


def bounded(counted, *, jobs: int, passes: int = 1) -> None:
    """By counting, which no busy machine upsets: how many scripts there were, and that none can have done much more
    than its share: a command or two for each job that it changes."""
    scripts = counted["evalsha"] + counted["eval"]
    least = jobs / 100 + passes * jobs / 200
    assert least <= scripts <= 1.1 * least + 15
    assert counted.total / scripts < 130


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds on an idle machine; this one may have others at work
@pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.scale)])
def test_cancelling_very_many_does_not_stall_redis(start_redis, count):
    server = start_redis()
    client = server.client()
    with DelayQueue(client) as queue:
        fill_fast(queue, count)
        with count_commands(client) as counted:
            result = invoke("--url", server.url, "cancel", "--name", "t", "--yes")
        assert result.stdout == f"{count:,} jobs cancelled\n"
        assert queue.stats().waiting == 0
    bounded(counted, jobs=count)


def press_ctrl_c_after(monkeypatch, batches: int) -> None:
    real, seen = steering.steer_rows, []

    def counted(*arguments):
        seen.append(1)
        if len(seen) == batches:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(steering, "steer_rows", counted)


@pytest.mark.parametrize(
    ("verb", "done", "left"),
    [
        (("cancel",), "cancelled", lambda queue: queue.stats().waiting),
        (("release-now",), "made due now", lambda queue: queue.stats().waiting - queue.stats().due),
    ],
)
def test_ctrl_c_says_how_far_it_came_and_a_second_call_does_the_rest(
    queue, run, monkeypatch, verb, done, left, request
):
    # What a shell starts in the background ignores the signal, and so do its children: these tests, perhaps.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, found))
    fill(queue, 1050)
    with monkeypatch.context() as patched:
        press_ctrl_c_after(patched, 3)
        result = run(*verb, "--name", "t", "--yes")
    assert result.exit_code == 130
    assert result.stdout == f"300 jobs {done}\n"
    assert "interrupted after 300 jobs" in result.stderr
    assert left(queue) == 750
    assert run(*verb, "--name", "t", "--yes").stdout == f"750 jobs {done}\n"
    assert left(queue) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_with_ids(queue, run, monkeypatch):
    fill(queue, 300)
    ids = waiting(queue)
    real = DelayQueue.cancel_many

    def pressed(self, some):
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, some)

    monkeypatch.setattr(DelayQueue, "cancel_many", pressed)
    result = run("cancel", "-", "--yes", "--json", input="\n".join(ids))
    assert result.exit_code == 130
    assert [one["id"] for one in json.loads(result.stdout)] == ids[:100]
    assert "100 of 300 jobs done" in result.stderr
    assert waiting(queue) == ids[100:]


def test_large_records_are_read_few_at_a_time(queue, redis_client):
    """Ids may name jobs of any size: a batch ends after a megabyte, and the rest comes in further ones."""
    queue.schedule_many(NewJob(b"x" * 500_000, delay=60, id=f"{n}") for n in range(12))
    with count_commands(redis_client) as counted:
        assert queue.cancel_many([f"{n}" for n in range(12)]) == [Outcome.CANCELLED] * 12
    assert counted["evalsha"] + counted["eval"] >= 4
