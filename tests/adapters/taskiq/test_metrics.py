"""Metrics and health of taskiq's processes."""

from __future__ import annotations

import pytest

from delayadapters.taskiq import DelayMiddleware
from delaytests import wait_until
from delaytests.http import fetch, port_told


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
