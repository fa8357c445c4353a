"""/metrics, /healthz and /readyz, in a process and from the command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from delayadapters import DelayQueue, Releaser
from delayadapters.metrics import MetricsServer, serve, serving
from delaytests import wait_until


class Nothing:
    def publish(self, claims):
        return None


@pytest.fixture
def served():
    made = []

    def start(*args, **kwargs):
        server = serve(*args, **{"port": 0, **kwargs})
        made.append(server)
        return server

    yield start
    for server in made:
        server.stop()


def test_a_release_process_that_is_well(queue, served, fetch):
    with Releaser(queue, Nothing()) as releaser:
        wait_until(lambda: releaser.stats.claims)
        port = served(queue, releaser).port
        assert fetch(port, "/healthz")[:2] == (200, "ok\n")
        assert fetch(port, "/readyz")[:2] == (200, "ok\n")
        scraped = fetch(port)
        assert scraped.status == 200
        assert f'delayadapters_up{{queue="{queue.name}"}} 1.0' in scraped.text
        assert scraped.kind.startswith("text/plain")
        assert "openmetrics" in fetch(port, accept="application/openmetrics-text; version=1.0.0").kind
        assert fetch(port, "/other").status == 404
    assert fetch(port, "/healthz")[:2] == (503, "the release loop has ended\n")
    assert fetch(port, "/readyz").status == 503
    assert fetch(port).status == 200


def test_redis_away_is_alive_and_not_ready(start_redis, served, fetch):
    server = start_redis()
    with DelayQueue.from_url(server.url, timeout=0.5) as queue, Releaser(queue, Nothing()) as releaser:
        port = served(queue, releaser).port
        server.stop()
        assert fetch(port, "/healthz").status == 200
        away = fetch(port, "/readyz")
        assert away.status == 503
        assert "Redis does not answer" in away.text
        scraped = fetch(port)
        assert scraped.status == 200
        assert "delayadapters_up{" in scraped.text
        assert "delayadapters_waiting{" not in scraped.text
        server.start()
        wait_until(lambda: fetch(port, "/readyz").status == 200)


def test_a_loop_that_has_not_heard_from_redis_is_not_ready(queue, served, fetch, monkeypatch):
    with Releaser(queue, Nothing(), lease=1) as releaser:
        wait_until(lambda: releaser.stats.claims)
        port = served(queue, releaser).port
        monkeypatch.setattr(serving, "SILENCE", -1.0)
        monkeypatch.setattr(type(releaser), "heard_ago", property(lambda self: 0.6))
        silent = fetch(port, "/readyz")
        assert (silent.status, "has not heard from Redis" in silent.text) == (503, True)
        assert fetch(port, "/healthz").status == 200


def test_an_idle_loop_hears_from_redis_all_the_time(queue):
    with Releaser(queue, Nothing()) as releaser, Releaser(queue, Nothing()) as other:
        wait_until(lambda: releaser.stats.peeks >= 2 and other.stats.peeks >= 2)
        wait_until(lambda: releaser.heard_ago < 10 and other.heard_ago < 10)


def test_a_port_in_use_is_one_line_and_is_taken_when_it_is_free(queue, served, fetch, caplog, monkeypatch):
    monkeypatch.setattr(serving, "AGAIN", 0.05)
    first = served(queue)
    port = first.port
    second = MetricsServer(queue, port=port)
    assert second.start() is False
    assert second.port is None
    try:
        wait_until(lambda: fetch(port).status == 200)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [record.name for record in warnings] == ["delayadapters.metrics"]
        first.stop()
        wait_until(lambda: second.port == port)
        assert fetch(port, "/healthz").status == 200
    finally:
        second.stop()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == warnings


@pytest.mark.parametrize(
    ("address", "error", "names"),
    [
        ({"port": -1}, ValueError, "metrics_port"),
        ({"port": 70_000}, ValueError, "metrics_port"),
        ({"port": True}, ValueError, "metrics_port"),
        ({"port": "9808"}, ValueError, "metrics_port"),
        ({"port": 0, "host": ""}, TypeError, "metrics_host"),
        ({"port": 0, "host": "192.0.2.1"}, OSError, "assign"),
    ],
)
def test_an_address_that_is_none(queue, served, address, error, names):
    with pytest.raises(error, match=names):
        served(queue, **address)


def test_the_command_serves_from_the_redis_state_alone(queue, redis_server, fetch):
    queue.schedule(b"", delay=99)
    command = [sys.executable, "-m", "delayadapters.cli", "--url", redis_server.url, "--name", queue.name]
    with subprocess.Popen([*command, "metrics", "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", line)
            assert found, line
            port = int(found[1])
            assert f'delayadapters_waiting{{queue="{queue.name}"}} 1.0' in fetch(port).text
            assert fetch(port, "/healthz").status == fetch(port, "/readyz").status == 200
            taken = subprocess.run(
                [*command, "metrics", "--port", str(port)], capture_output=True, text=True, timeout=60, check=False
            )
            assert taken.returncode == 1
            assert "another process" in taken.stderr
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
