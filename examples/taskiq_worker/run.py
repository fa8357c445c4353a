"""The whole example in one command: a worker, the API, and a client that uses it.

    python run.py [--stay]

Needs a Redis: REDIS_URL, else redis://localhost:6379/0. ``--stay`` leaves worker and API running until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    port = free_port()
    commands = [
        ["-m", "taskiq", "worker", "reminders:broker", "--workers", "1", "--log-level", "ERROR"],
        ["-m", "uvicorn", "api:app", "--port", str(port), "--log-level", "warning"],
    ]
    processes = [subprocess.Popen([sys.executable, *command], cwd=HERE) for command in commands]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as api:
            until(lambda: api.get("/reminders").is_success)
            use(api)
        if "--stay" in sys.argv:
            print(f"API: http://127.0.0.1:{port}/docs; Ctrl-C ends it", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(20)


def use(api: httpx.Client) -> None:
    def add(text: str, seconds: float) -> str:
        return str(api.post("/reminders", params={"text": text, "seconds": seconds}).json()["id"])

    soon, later = add("drink water", 1.0), add("go home", 3600)
    order = api.post("/charges/7").json()["id"]
    print("waiting:", [job["task"] for job in api.get("/reminders").json()], flush=True)
    print("cancelled:", api.delete(f"/reminders/{later}").json()["outcome"], flush=True)
    for id in (soon, later, order):
        until(lambda id=id: api.get(f"/reminders/{id}").json()["ready"])
        print("result:", api.get(f"/reminders/{id}").json(), flush=True)
    left = [job for job in api.get("/reminders").json() if job["id"] in (soon, later, order)]
    print("still waiting:", left, flush=True)


def until(condition, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > end:
            raise SystemExit("the API or the worker did not answer; is Redis there? " + os.environ.get("REDIS_URL", ""))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
