"""Metrics and health of Celery's processes: workers of each kind, and ``celery delay run``."""

from __future__ import annotations

import signal
import socket

import pytest
from celery.exceptions import ImproperlyConfigured

from delayadapters.celery.metrics import check_metrics
from delaytests import wait_until
from delaytests.http import fetch, port_told


def told(process) -> int:
    port = wait_until(lambda: port_told(process.log), message=process.log)
    assert port is not None
    return port


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_serves_metrics_from_where_it_releases(worker, redis_broker, make_app, executions, pool):
    app = make_app(redis_broker.conf)
    process = worker({**redis_broker.conf, "delayadapters_metrics_port": 0}, pool)
    port = told(process)
    app.tasks["note"].apply_async(countdown=1.2)
    wait_until(executions)
    name = app.delayadapters.name

    def seen() -> bool:
        text = fetch(port).text
        assert f'delayadapters_scheduled_total{{queue="{name}"}} 1.0' in text
        assert f'delayadapters_released_total{{queue="{name}"}} 1.0' in text
        assert f'delayadapters_loops_alive{{queue="{name}"}} 1.0' in text
        assert f'delayadapters_batch_size_count{{queue="{name}"}} 1.0' in text, "the process that releases serves"
        return True

    assert wait_until(seen)
    assert fetch(port, "/healthz").status == fetch(port, "/readyz").status == 200


def test_delay_run_serves_metrics_beside_another_one(celeryd, redis_broker, make_app):
    app = make_app(redis_broker.conf)
    first = celeryd(redis_broker.conf, "delay", "run", "--metrics-port", "0", ready="served")
    port = told(first)
    second = celeryd(redis_broker.conf, "delay", "run", "--metrics-port", str(port), ready="taken by another process")
    wait_until(lambda: len(app.delayadapters.loops()) == 2)
    wait_until(lambda: f'delayadapters_loops_alive{{queue="{app.delayadapters.name}"}} 2.0' in fetch(port).text)
    assert fetch(port, "/readyz").status == 200
    assert second.stop(signal.SIGTERM) == 0
    assert first.stop(signal.SIGTERM) == 0
    assert second.log.count("taken by another process") == 1


@pytest.mark.parametrize("pool", ["prefork", "solo"])
@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_worker_that_cannot_listen_says_so_once_and_releases(worker, redis_broker, make_app, executions, pool, host):
    app = make_app(redis_broker.conf)
    process = worker({**redis_broker.conf, "delayadapters_metrics_port": 0, "delayadapters_metrics_host": host}, pool)
    for _ in range(2):
        app.tasks["note"].apply_async(countdown=1.1)
    wait_until(lambda: len(executions()) == 2, message=process.log)
    assert process.log.count("metrics are not served") == 1
    assert "died after" not in process.log


def test_delay_run_that_cannot_listen_says_so(celeryd, redis_broker):
    process = celeryd(
        redis_broker.conf, "delay", "run", "--metrics-port", "0", "--metrics-host", "192.0.2.1", ready=None
    )
    assert process.process.wait(60) == 1
    assert "Error:" in process.log
    assert "Traceback" not in process.log


@pytest.mark.parametrize("port", [-1, "nine", 70_000, True])
def test_a_bad_setting_is_named(redis_broker, make_app, port):
    with pytest.raises(ImproperlyConfigured, match="delayadapters_metrics_port"):
        check_metrics(make_app({**redis_broker.conf, "delayadapters_metrics_port": port}))


@pytest.mark.parametrize("port", [None, 0, 9808, "9808"])
def test_a_good_setting_is_none(redis_broker, make_app, port):
    check_metrics(make_app({**redis_broker.conf, "delayadapters_metrics_port": port}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing was listened on: checking only checks
