"""export and import: everything is kept, nothing is doubled, and nothing is lost without a word."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone

import pytest

from delayadapters import NewJob, Payload, State
from delayadapters.redis import steering
from delaytests.raw import keys_of
from delaytests.server import free_port

from .conftest import fill_fast, invoke, kill_one


@pytest.fixture
def source(make_queue):
    return make_queue(name="source")


@pytest.fixture
def target(make_queue):
    return make_queue(name="target")


@pytest.fixture
def export(run, source):
    """``export()``: the lines."""

    def call(*arguments):
        result = run("export", *arguments, name="source")
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


@pytest.fixture
def take_in(run, target):
    """``take_in(text)``: what import --json says."""

    def call(text, *arguments, code=0):
        result = run("import", "--json", *arguments, name="target", input=text)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return call


def everything(queue, *, dead=False):
    found, cursor = [], None
    while True:
        page = (queue.dead_jobs if dead else queue.jobs)(limit=1000, cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


def test_everything_is_kept(source, target, export, take_in, redis_client):
    for n in range(5):
        source.schedule(bytes([n, 0xFF]), delay=100, id=f"tie-{n}", meta={"task": "t", "queue": "q", "ü": "ß"})
    source.schedule(b"past", at=datetime(2001, 1, 1, tzinfo=timezone.utc), id="past")
    source.schedule(b"far", at=datetime(2250, 1, 1, tzinfo=timezone.utc), id="far")
    for n in range(3):
        source.schedule(b"%d" % n, delay=500 - n, id="same id", if_exists="add")
    source.schedule(b"", delay=0, id="retried")
    claims = source.claim()
    source.fail([one for one in claims if one.id == "retried"], "tröuble", retry_in=900)
    source.give_back([one for one in claims if one.id != "retried"])
    text = export()
    assert take_in(text) == {"read": 11, "imported": 11, "skipped": 0, "complete": True}
    assert everything(target) == everything(source)
    assert [job.id for job in everything(target)][:6] == ["past", *(f"tie-{n}" for n in range(5))]
    places = [
        redis_client.zrange(keys_of(queue).due, 0, -1, withscores=True, score_cast_func=int)
        for queue in (source, target)
    ]
    assert [score for _, score in places[0]] == [score for _, score in places[1]]
    assert len(everything(source)) == 11, "the source is left as it was"


def test_what_is_taken_in_works_like_what_was_scheduled(source, target, export, take_in):
    for n in range(3):
        source.schedule(b"%d" % n, delay=0 if n else 60, id="a", if_exists="add")
    take_in(export())
    assert sorted(one.payload for one in target.claim()) == [b"1", b"2"]
    assert target.cancel("a").value == "in_flight"
    assert target.stats().waiting == 0
    assert target.counters().scheduled == 3


def test_a_direct_release_is_kept(source, target, export, take_in, redis_client):
    release = [
        (Payload.UNLESS_EXISTS, b"guard\xff"),
        ("LPUSH", "broker", Payload.BYTES),
        ("HSET", "seen", [b"\xfe", Payload.ID], 7),
    ]
    source.schedule(b"\x00payload", delay=0, id="a", release=release)
    text = export()
    take_in(text)
    assert target.claim() == []
    assert redis_client.lrange("broker", 0, -1) == [b"\x00payload"]
    assert redis_client.hgetall("seen") == {b"\xfea": b"7"}
    redis_client.delete("broker", "seen")
    line = json.loads(text.splitlines()[1])
    assert line["release"][1] == ["LPUSH", "broker", {"put": "BYTES"}]


def test_a_direct_release_that_was_done_in_part_goes_on_there(source, target, export, take_in, redis_client):
    redis_client.set("wrong", "a string")
    source.schedule(b"x", delay=0, id="a", release=[("LPUSH", "broker", "once"), ("LPUSH", "wrong", "x")])
    source.claim()
    assert source.get("a").attempts == 1
    take_in(export())
    redis_client.delete("wrong")
    target.release_now("a")
    target.claim()
    assert redis_client.lrange("broker", 0, -1) == [b"once"]
    assert redis_client.lrange("wrong", 0, -1) == [b"x"]
    redis_client.delete("broker", "wrong")


def test_the_dead_on_request(source, target, export, take_in):
    kill_one(source, "a", "why")
    source.schedule(b"x", delay=60, id="b")
    assert take_in(export())["imported"] == 1
    assert take_in(export("--dead")) == {"read": 2, "imported": 1, "skipped": 1, "complete": True}
    assert everything(target, dead=True) == everything(source, dead=True)
    assert target.replay("a").value == "replayed"


def test_an_unreadable_record_is_dead_there(source, target, export, take_in, redis_client):
    source.schedule(b"x", delay=60, id="a")
    redis_client.hset(keys_of(source).entries, "a", b"\xf0 newer version")
    assert take_in(export())["imported"] == 1
    job = target.get("a")
    assert (job.state, job.payload, job.reason) == (State.DEAD, b"\xf0 newer version", "unreadable record")


def test_filters(source, export, take_in):
    for n in range(4):
        source.schedule(b"", delay=60 + n, id=f"{n}", meta={"task": "odd" if n % 2 else "even"})
    assert take_in(export("--name", "odd", "--due-before", "62.5"))["imported"] == 1


def test_shards_may_differ(redis_server, make_queue):
    few, many = make_queue(name="few", shards=2), make_queue(name="many", shards=5)
    few.schedule_many(NewJob(b"%d" % n, delay=60 + n, id=f"{n}") for n in range(300))
    text = invoke("--url", redis_server.url, "--name", "few", "--shards", "2", "export").stdout
    given = ("--url", redis_server.url, "--name", "many", "--shards", "5", "import", "--json")
    assert json.loads(invoke(*given, input=text).stdout)["imported"] == 300
    assert json.loads(invoke(*given, input=text).stdout)["imported"] == 0
    assert everything(many) == everything(few)


# --------------------------------------------------------------------------------------------------------- interrupted


def press_ctrl_c_in_batch(monkeypatch, number):
    real, seen = steering.restore, []

    def pressed(*arguments):
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(steering, "restore", pressed)


def test_an_interrupted_import_continues_without_doubles(source, target, export, run, take_in, monkeypatch):
    """Ctrl-C in the middle. Then the same file, and an export of its own: each takes in only what is missing."""
    source.schedule_many((NewJob(b"%d" % n, delay=3600, id=f"{n % 700}") for n in range(1400)), if_exists="add")
    text = export()
    with monkeypatch.context() as patched:
        press_ctrl_c_in_batch(patched, 2)
        result = run("import", name="target", input=text)
    assert result.exit_code == 130
    assert result.stdout.startswith("1,000 jobs imported")
    assert "the same call again does the rest" in result.stderr
    # What happens there meanwhile is not undone by going on.
    assert target.cancel("0").value == "cancelled"
    assert take_in(export()) == {"read": 1400, "imported": 400, "skipped": 1000, "complete": True}
    assert take_in(text) == {"read": 1400, "imported": 0, "skipped": 1400, "complete": True}
    assert [job for job in everything(source) if job.id != "0"] == [job for job in everything(target) if job.id != "0"]


@pytest.mark.slow
def test_a_killed_import_continues_without_doubles(redis_server, source, target, export, take_in, tmp_path):
    """SIGKILL, at whatever moment it comes."""
    source.schedule_many((NewJob(b"%d" % n, delay=3600, id=f"{n % 50}") for n in range(3000)), if_exists="add")
    file = tmp_path / "backlog.jsonl"
    file.write_text(export())
    command = [sys.executable, "-m", "delayadapters.cli", "--url", redis_server.url, "--name", "target", "import"]
    process = subprocess.Popen([*command, str(file)])
    while target.stats().waiting == 0:
        assert process.poll() is None or target.stats().waiting
    process.kill()
    process.wait()
    assert take_in(file.read_text())["complete"]
    assert everything(target) == everything(source)


def test_what_was_released_meanwhile_does_not_come_back(source, export, take_in, target):
    source.schedule(b"x", delay=0, id="a")
    text = export()
    take_in(text)
    assert target.ack(target.claim()) == 1
    assert take_in(text)["skipped"] == 1
    assert target.stats().waiting == 0
    assert take_in(text, "--again")["imported"] == 1


@pytest.mark.parametrize("ends", ["interrupted", "cut short", "spoilt"])
def test_importing_again_can_be_resumed(source, target, export, run, take_in, monkeypatch, ends):
    """By the label that it prints when it begins: each job is there once more than before, not twice."""
    source.schedule_many(NewJob(b"%d" % n, delay=3600, id=f"{n}") for n in range(1400))
    text = export()
    take_in(text)
    lines = text.splitlines(keepends=True)
    part = {"interrupted": lines, "cut short": lines[:1001], "spoilt": [*lines[:1001], "x\n"]}[ends]
    with monkeypatch.context() as patched:
        if ends == "interrupted":
            press_ctrl_c_in_batch(patched, 2)
        result = run("import", "--again", "--json", name="target", input="".join(part))
    assert result.exit_code == (130 if ends == "interrupted" else 1)
    view = json.loads(result.stdout)
    label = view.pop("label")
    assert view == {"read": 1000, "imported": 1000, "skipped": 0, "complete": False}
    begins, *_, end = result.stderr.splitlines()
    assert begins.startswith(f"label {label}: ")
    assert f"--resume {label}" in end
    for expected in (400, 0):
        said = take_in(export(), "--resume", label)
        assert (said["imported"], said["label"], said["complete"]) == (expected, label, True)
    jobs = [job.id for job in everything(target)]
    assert sorted(jobs) == sorted([f"{n}" for n in range(1400)] * 2)
    assert take_in(text)["imported"] == 0, "without a label it is the first import that is gone on with"


def test_a_label_is_one_that_was_printed(source, export, run, target):
    source.schedule(b"x", delay=60)
    text = export()
    for wrong in (["--resume", ""], ["--resume", "x"], ["--again", "--resume", "20260101T000000.000000"]):
        assert run("import", *wrong, name="target", input=text).exit_code == 2
    dry = run("import", "--again", "--dry-run", "--json", name="target", input=text)
    assert dry.stderr == ""
    assert json.loads(dry.stdout) == {"read": 1, "imported": 0, "skipped": 0, "complete": True}
    assert target.stats().waiting == 0


def test_a_file_is_not_emptied_before_redis_has_answered(source, run, tmp_path):
    """An export that cannot begin leaves the one before it as it was."""
    source.schedule(b"x", delay=60)
    file = tmp_path / "backlog.jsonl"
    assert run("export", "-o", str(file), name="source").exit_code == 0
    before = file.read_text()
    url = f"redis://127.0.0.1:{free_port()}/0"
    failed = invoke("--url", url, "--timeout", "1", "export", "-o", str(file))
    assert failed.exit_code == 69
    assert file.read_text() == before
    source.schedule(b"x", delay=60)
    assert run("export", "-o", str(file), name="source").exit_code == 0
    assert len(file.read_text().splitlines()) == 4
    nowhere = run("export", "-o", str(tmp_path / "no folder" / "file"), name="source")
    assert nowhere.exit_code == 1
    assert "Traceback" not in nowhere.output


def test_a_queue_used_anew_is_another_one(source, export, take_in):
    """After a purge numbers begin anew; a job like an earlier one is not taken for it."""
    source.schedule(b"x", delay=60, id="nightly")
    assert take_in(export())["imported"] == 1
    source.purge()
    source.schedule(b"x", delay=120, id="nightly")
    assert take_in(export())["imported"] == 1


@pytest.mark.parametrize("cut", [1, 2, -1, "in a line"])
def test_a_file_that_was_cut_short_is_known_as_such(source, export, run, take_in, target, cut):
    for n in range(3):
        source.schedule(b"x", delay=60, id=f"{n}")
    whole = export()
    text = whole[:-60] if cut == "in a line" else "".join(whole.splitlines(keepends=True)[:cut])
    result = run("import", name="target", input=text)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert take_in(whole)["complete"]
    assert len(everything(target)) == 3


HEADER = '{"delayadapters":1}\n'
JOB = {"id": "a", "due": 4_000_000_000_000_000, "token": base64.b64encode(b"t").decode(), "payload": "eA=="}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "ends before its end"),
        ("x\n", "line 1: not JSON"),
        ("[]\n", "line 1: not a JSON object"),
        ('{"delayadapters":99}\n', "line 1: not what delayadapters export writes"),
        (HEADER + "{}\n", "line 2: KeyError"),
        (HEADER + json.dumps({**JOB, "payload": "!"}) + "\n", "line 2: Error"),
        (HEADER + json.dumps({**JOB, "due": "x"}) + "\n", "line 2: ValueError"),
        (HEADER + json.dumps({**JOB, "due": 10**17}) + "\n", "line 2: ValueError"),
        (HEADER + json.dumps({**JOB, "id": ""}) + "\n", "line 2: ValueError"),
        (HEADER + json.dumps({**JOB, "meta": {"a": 1}}) + "\n", "line 2: TypeError"),
        (HEADER + json.dumps({**JOB, "release": [[5]]}) + "\n", "line 2: ValueError"),
        (HEADER + json.dumps({**JOB, "attempts": -1}) + "\n", "line 2: ValueError"),
        (HEADER + json.dumps(JOB) + '\n{"end":true,"jobs":2}\n', "lines are missing"),
    ],
)
def test_what_export_did_not_write(run, target, text, told):
    result = run("import", name="target", input=text)
    assert result.exit_code == 1
    assert told in result.stderr
    assert "Traceback" not in result.output


def test_a_dry_run_stores_nothing(source, target, export, run):
    source.schedule(b"x", delay=60)
    assert run("import", "--dry-run", name="target", input=export()).stdout.startswith("dry run: 1 job would be")
    assert target.stats().waiting == 0


def test_what_is_being_released_is_told_of(source, run, tmp_path):
    source.schedule(b"x", delay=0)
    assert source.claim()
    file = tmp_path / "out.jsonl"
    result = run("export", "-o", str(file), name="source")
    assert result.stderr == "0 jobs exported; 1 being released and not among them\n"
    assert json.loads(file.read_text().splitlines()[-1]) == {"end": True, "jobs": 0}


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds on an idle machine; this one may have others at work
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.scale)])
def test_very_many_through_a_pipe(redis_server, make_queue, count):
    source, target = make_queue(name="source"), make_queue(name="target")
    fill_fast(source, count)
    command = f"{sys.executable} -m delayadapters.cli --url {redis_server.url} --name"
    pipe = f"{command} source export | {command} target import --json"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"read": count, "imported": count, "skipped": 0, "complete": True}
    one, other = everything(source), everything(target)
    assert len(one) == count
    assert one == other
