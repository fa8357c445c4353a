"""The rights which docs/reference/acl.md names for the arq adapter suffice."""

from __future__ import annotations

import re
from pathlib import Path

from arq import Retry
from arq.connections import RedisSettings

from delayadapters.arq import DelayWorker, migrate
from delaytests import wait_until_async

DOC = Path(__file__).parents[3] / "docs" / "reference" / "acl.md"


async def test_the_documented_rights_suffice(server, stock, make_pool, work, caplog):
    (line,) = re.findall(r"^ACL SETUSER delay-arq .*$", DOC.read_text("utf-8"), re.MULTILINE)
    server.client().execute_command(*line.split())
    settings = RedisSettings(port=server.port, username="delay-arq", password="choose-a-password")
    pool = await make_pool(settings)

    async def flaky(ctx):
        if ctx["job_try"] < 3:
            raise Retry(defer=0.02)
        return "ok"

    await stock.enqueue_job("flaky", _job_id="native", _defer_by=60)
    assert (await migrate(pool, dry_run=False)).moved == 1
    worker = work(flaky, redis_settings=settings, cls=DelayWorker)
    await wait_until_async(lambda: worker.releaser is not None)
    first = await pool.enqueue_job("flaky", _job_id="one", _defer_by=0.1, _expires=30)
    assert await first.result(timeout=40, poll_delay=0.02) == "ok"
    again = await pool.enqueue_job("flaky", _job_id="one", _defer_by=60, _if_exists="replace")
    assert await again.abort() is True
    now = await pool.enqueue_job("flaky")
    assert await now.result(timeout=40, poll_delay=0.02) == "ok"
    assert len(await pool.queued_jobs()) == 1
    assert {r.job_id for r in await pool.all_job_results()} == {"one", now.job_id}
    assert worker.releaser.stats.failed == 0
    assert "perm" not in caplog.text.lower()
