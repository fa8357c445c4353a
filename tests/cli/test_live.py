"""top, drain and purge."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading

import pytest

from delayadapters import DelayQueue, NewJob
from delaytests import wait_until

from .conftest import invoke


def test_top_without_a_terminal_prints_plain_frames(queue, run):
    queue.schedule_many(NewJob(b"", delay=60) for _ in range(5))
    result = run("top", "--iterations", "2", "--interval", "0.1")
    assert result.exit_code == 0
    frames = result.stdout.split("\n\nqueue ")
    assert len(frames) == 2
    for frame in frames:
        assert "waiting         5" in frame
        assert "a second        scheduled" in frame
    assert "\x1b" not in result.stdout


def test_top_counts_what_happens_a_second(queue, run, monkeypatch):
    from delayadapters.cli import live

    real = live._wait

    def scheduling(*arguments):
        queue.schedule_many(NewJob(b"", delay=60) for _ in range(50))
        return real(*arguments)

    monkeypatch.setattr(live, "_wait", scheduling)
    result = run("top", "--iterations", "2", "--interval", "0.2", "--json")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["per_second"]["scheduled"] == 0
    assert 0 < second["per_second"]["scheduled"] <= 50 / 0.2
    assert second["waiting"] == 50


def test_top_ends_with_ctrl_c(run, monkeypatch):
    from delayadapters.cli import live

    monkeypatch.setattr(
        live, "take_picture", lambda queue, real=live.take_picture: os.kill(os.getpid(), 2) or real(queue)
    )
    result = run("top", "--interval", "60")
    assert result.exit_code == 0
    assert result.stdout.count("waiting") == 1


@pytest.mark.slow
def test_top_goes_on_when_redis_comes_back(start_redis):
    """And says meanwhile what is wrong; at its first look it ends."""
    server = start_redis(aof="always")
    command = [sys.executable, "-m", "delayadapters.cli", "--url", server.url, "--timeout", "2"]
    process = subprocess.Popen([*command, "top", "--json", "--interval", "0.1"], stdout=subprocess.PIPE, text=True)
    lines: list[dict] = []
    reader = threading.Thread(target=lambda: lines.extend(json.loads(line) for line in process.stdout))
    reader.start()
    try:
        wait_until(lambda: lines and lines[-1]["error"] is None, 30)
        server.kill()
        wait_until(lambda: lines[-1]["error"], 30)
        server.restart()
        wait_until(lambda: lines[-1]["error"] is None, 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    server.stop()
    assert invoke("--url", server.url, "--timeout", "2", "top", "--iterations", "3").exit_code == 69


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["q", "ctrl-c"])
def test_top_on_a_terminal(redis_server, queue, ending):
    """It takes the screen, and gives it back as it was."""
    queue.schedule(b"", delay=60)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 90)) if hasattr(termios, "tcsetwinsize") else None
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "delayadapters.cli", "--url", redis_server.url, "--name", queue.name, "top"]
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    shown = bytearray()

    def drink() -> None:
        while True:
            try:
                some = os.read(ours, 65536)
            except OSError:
                return
            if not some:
                return
            shown.extend(some)

    reader = threading.Thread(target=drink, daemon=True)
    reader.start()
    try:
        wait_until(lambda: b"q ends" in shown, 30)
        assert b"\x1b[?1049h" in shown, "the alternate screen"
        if ending == "q":
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_until(lambda: b"\x1b[?1049l" in shown)
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        reader.join(5)
        os.close(ours)


# --------------------------------------------------------------------------------------------------------------- drain


def test_an_empty_queue_is_drained(run):
    result = run("drain")
    assert (result.exit_code, result.stdout) == (0, "drained: 0 waiting, 0 of these due, 0 being released\n")


def test_drain_waits_for_what_waits_and_what_is_being_released(queue, redis_server, run):
    queue.schedule(b"", delay=0, id="a")
    claims = queue.claim()
    queue.schedule(b"", delay=60, id="b")
    results = []
    thread = threading.Thread(target=lambda: results.append(run("drain")))
    thread.start()
    with DelayQueue.from_url(redis_server.url, name=queue.name) as other:
        other.cancel("b")
        thread.join(1)
        assert results == []
        other.ack(claims)
    thread.join(30)
    assert results[0].exit_code == 0


def test_drain_gives_up(queue, run):
    queue.schedule(b"", delay=60)
    result = run("drain", "--timeout", "0.3", "--json")
    assert result.exit_code == 1
    view = json.loads(result.stdout)
    assert (view["outcome"], view["waiting"]) == ("timed out", 1)
    assert view["seconds"] >= 0.3
    assert run("drain", "--due").exit_code == 0, "nothing is due"
    queue.schedule(b"", delay=0)
    assert run("drain", "--due", "--timeout", "0.1s").exit_code == 1


def test_drain_ends_with_ctrl_c(queue, run):
    queue.schedule(b"", delay=60)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert run("drain").exit_code == 130


# --------------------------------------------------------------------------------------------------------------- purge


def test_purge_asks(queue, run):
    queue.schedule(b"", delay=60)
    assert run("purge", input="n\n").exit_code == 1
    assert queue.stats().waiting == 1
    assert run("purge", "--yes").stdout == "purged: 1 job\n"
    assert queue.stats().waiting == 0
