"""The whole example in one command: the database, a worker, two orders of which one is rolled back.

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


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="django-shop-") as folder:
        os.environ["SHOP_DATABASE"] = str(Path(folder) / "shop.sqlite3")
        os.chdir(HERE)
        manage("migrate", "--verbosity", "0")
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-c", "1", "-l", "WARNING"]
        worker = subprocess.Popen(command)
        try:
            manage("order", "ada", "--remind-after", "6")
            manage("order", "grace", "--remind-after", "6", "--refused")
            follow()
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)


def manage(*arguments: str) -> None:
    subprocess.run([sys.executable, "manage.py", *arguments], check=True)


def follow() -> None:
    """Until the worker has confirmed the order and sent the reminder."""
    sys.path.insert(0, str(HERE))
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    django.setup()
    from orders.models import Order

    end = time.monotonic() + 90
    while True:
        orders = list(Order.objects.values("customer", "confirmed", "reminders"))
        if orders == [{"customer": "ada", "confirmed": True, "reminders": 1}]:
            print(f"done: {orders}", flush=True)
            return
        if time.monotonic() > end:
            sys.exit(f"waited 90 s in vain; the orders: {orders}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
