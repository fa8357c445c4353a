"""Metrics and health of taskiq's processes."""

from __future__ import annotations

import pytest

from delayadapters.taskiq import DelayMiddleware
from delaytests import wait_until, wait_until_async
from delaytests.http import fetch, port_told
from delaytests.taskiqs import started


async def test_whoever_releases_serves_metrics(make_broker):
    broker = make_broker(delay={"metrics_port": 0, "embed_in_client": True})
    assert broker.delay.metrics is None
    await broker.startup()
    try:
        port = broker.delay.metrics.port
        import asyncio

        name = broker.delay.name
        seen = await asyncio.to_thread(fetch, port)
        assert f'delayadapters_up{{queue="{name}"}} 1.0' in seen.text
        assert (await asyncio.to_thread(fetch, port, "/readyz")).status == 200
        assert (await asyncio.to_thread(fetch, port, "/healthz")).status == 200
    finally:
        await broker.shutdown()
    assert broker.delay.metrics is None
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, port)


async def test_an_address_that_cannot_be_had_stops_no_release(make_broker, caplog):
    broker = make_broker(delay={"metrics_port": 9, "metrics_host": "203.0.113.9", "embed_in_client": True})

    @broker.task
    async def task(): ...

    async with started(broker):
        await task.kicker().with_labels(delay=0.1).kiq()

        async def released():
            return (await broker.delay.queue.counters()).released == 1

        await wait_until_async(released, timeout=30)
        assert broker.delay.metrics is None
    assert "203.0.113.9:9 cannot be served" in caplog.text


def test_delay_release_serves_metrics(app):
    process = app.start("delay-release", "delay_taskiq_app:broker", "--metrics-port", "0", EMBED="0")
    port = wait_until(lambda: port_told(app.log(process)), timeout=60)
    assert port is not None
    wait_until(lambda: fetch(port, "/readyz").status == 200)
    assert "delayadapters_loops_alive{" in fetch(port).text
    app.stop(process)


@pytest.mark.parametrize(("argument", "value"), [("metrics_port", -1), ("metrics_port", "1"), ("metrics_host", "")])
def test_a_bad_address_is_named(argument, value):
    with pytest.raises((TypeError, ValueError), match=argument):
        DelayMiddleware("redis://localhost", **{argument: value})
