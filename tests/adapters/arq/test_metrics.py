"""Metrics and health of arq's processes."""

from __future__ import annotations

import pytest

from delayadapters.arq import DelaySettings
from delaytests import wait_until
from delaytests.http import fetch, port_told


def test_a_worker_serves_metrics_where_its_command_says(start_worker):
    worker = start_worker("Settings", "--metrics-port", "0").wait_ready()
    port = wait_until(lambda: port_told(worker.log()), timeout=60)
    assert port is not None
    wait_until(lambda: fetch(port, "/readyz").status == 200)
    assert fetch(port, "/healthz").status == 200
    seen = fetch(port).text
    assert 'delayadapters_up{queue="delayadapters:arq"} 1.0' in seen
    assert "delayadapters_claim_duration_seconds_count{" in seen
    assert worker.stop() == 0


async def test_an_address_that_cannot_be_had_stops_no_job(make_pool, work, caplog):
    nowhere = DelaySettings(metrics_port=9, metrics_host="203.0.113.9", timeout=60)
    pool = await make_pool(delay_settings=nowhere)

    async def add(ctx, a):
        return a + 1

    worker = work(add, delay_settings=nowhere)
    job = await pool.enqueue_job("add", 1, _defer_by=0.1)
    assert await job.result(timeout=40, poll_delay=0.02) == 2
    assert worker.metrics is None
    assert "203.0.113.9:9 cannot be served" in caplog.text


def test_the_command_names_a_bad_port(start_worker):
    worker = start_worker("Settings", "--metrics-port", "99999")
    assert worker.wait() == 2
    assert "--metrics-port" in worker.log()


@pytest.mark.parametrize(("field", "value"), [("metrics_port", -1), ("metrics_port", "1"), ("metrics_host", "")])
def test_a_bad_address_is_named(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        DelaySettings(**{field: value})
