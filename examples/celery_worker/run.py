"""The project in one command: a worker, and a shop that uses it.

    python run.py

Needs a Redis: REDIS_URL, else redis://localhost:6379/0. Exit status 1 when anything is amiss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WANTED = ("reminder for ada: a telescope is waiting", "order 17 is not paid yet", "order 17 is paid")


def main() -> None:
    command = [sys.executable, "-m", "celery", "-A", "proj", "worker", "-c", "2", "-l", "WARNING"]
    with tempfile.NamedTemporaryFile("r", prefix="celery-worker-", errors="replace") as log:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(log.name, "wb") as out:
            worker = subprocess.Popen(command, cwd=HERE, stdout=out, stderr=out, env=environment)
        try:
            subprocess.run([sys.executable, "shop.py"], cwd=HERE, check=True)
            follow(log.name)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)


def follow(log: str) -> None:
    """Shows what the worker says, until it has said everything."""
    end, shown = time.monotonic() + 90, 0
    while True:
        text = Path(log).read_text(errors="replace")
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if all(line in text for line in WANTED):
            print("done: the reminder that was kept came, the payment arrived at the third time of asking", flush=True)
            return
        if time.monotonic() > end:
            sys.exit("the worker did not say it all; is Redis there? " + os.environ.get("REDIS_URL", ""))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
