"""What a web application would do: enqueue for later, cancel, bring forward, debounce."""

from __future__ import annotations

import asyncio

from jobs import REDIS

from delayadapters.arq import DelayJob, create_pool


async def main() -> None:
    redis = await create_pool(REDIS)

    # Three orders, each to be reminded of in 5 s.
    for order in (1, 2, 3):
        await redis.enqueue_job("remind", order, _job_id=f"remind-{order}", _defer_by=5)

    # Order 1 is paid: its reminder is never sent. This is final, and immediate.
    print("order 1 paid, reminder aborted:", await DelayJob("remind-1", redis).abort())

    # Somebody asks for the reminder of order 2 right now.
    print("order 2 at once:", (await DelayJob("remind-2", redis).release_now()).value)

    # Order 3 is charged; the bank needs three tries.
    payment = await redis.enqueue_job("charge", 3, _defer_by=1)

    # A price changes five times in a second; the index is written once.
    for price in (10, 11, 12, 13, 14):
        await redis.enqueue_job("reindex", "tea", price, _job_id="reindex-tea", _defer_by=1, _if_exists="replace")
        await asyncio.sleep(0.1)

    print("waiting:", [(job.function, job.args) for job in await redis.queued_jobs()])
    assert payment is not None
    print("payment:", await payment.result(timeout=60, poll_delay=0.05))
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main())
