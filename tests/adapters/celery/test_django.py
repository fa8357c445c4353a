"""examples/django_shop: CELERY_… settings, and tasks sent or scheduled when a transaction commits, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "django_shop"


@pytest.mark.timeout(240)
def test_the_one_command(redis_broker: Any, run_example: Callable[[Path], str]) -> None:
    said = run_example(EXAMPLE)
    assert "ada: in the transaction 0 reminders wait" in said
    assert "ada: committed, 1 reminders wait" in said
    # Ada's own is still there, or has just gone: Grace's adds nothing.
    before = said.split("grace: in the transaction ")[1][0]
    assert f"grace: rolled back, {before} reminders wait" in said or "grace: rolled back, 0 reminders wait" in said
    assert "done: [{'customer': 'ada', 'confirmed': True, 'reminders': 1}]" in said
    client = redis_broker.redis.client()
    assert [key for key in client.scan_iter("{django-shop:*") if b":due" in key] == [], "nothing waits any more"
    assert client.exists("{django-shop:0}:seq"), "the queue has the name that Django's settings say"
