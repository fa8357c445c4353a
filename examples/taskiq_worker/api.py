"""A FastAPI app that sends delayed tasks, shows and cancels them. ``uvicorn api:app``"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from reminders import broker, charge, delay, remind
from taskiq import AsyncTaskiqTask

from delayadapters import Outcome


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # A worker that imports this module starts the broker itself.
    if not broker.is_worker_process:
        await broker.startup()
    yield
    if not broker.is_worker_process:
        await broker.shutdown()


app = FastAPI(lifespan=lifespan)


@app.post("/reminders")
async def add(text: str, seconds: float) -> dict[str, str]:
    task = await remind.kicker().with_labels(delay=seconds).kiq(text, time.time() + max(seconds, 0))
    return {"id": task.task_id}


@app.get("/reminders")
async def waiting() -> list[dict[str, Any]]:
    page = await delay.queue.jobs(limit=100)
    return [{"id": job.id, "task": job.meta["task"], "due": job.due_at.isoformat()} for job in page.jobs]


@app.delete("/reminders/{id}")
async def cancel(id: str) -> dict[str, str]:
    outcome = await delay.cancel(id)
    if outcome is Outcome.NOT_FOUND:
        raise HTTPException(404, "no such reminder")
    return {"outcome": outcome.value}


@app.get("/reminders/{id}")
async def result(id: str) -> dict[str, Any]:
    task: AsyncTaskiqTask[Any] = AsyncTaskiqTask(id, broker.result_backend)
    if not await task.is_ready():
        return {"ready": False}
    found = await task.get_result()
    return {"ready": True, "error": str(found.error) if found.is_err else None, "result": found.return_value}


@app.post("/charges/{order}")
async def pay(order: int) -> dict[str, str]:
    return {"id": (await charge.kiq(order)).task_id}
