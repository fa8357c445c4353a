"""Two things that shops do later: remind somebody, and ask again whether a payment has arrived."""

import logging
from typing import Any

from .celery import app

log = logging.getLogger(__name__)


class PaymentPending(Exception):
    """The bank has not heard of it yet."""


@app.task
def send_reminder(customer: str, cart: str) -> None:
    """Send with ``send_reminder.apply_async((…), countdown=3600)``, and cancel it when the cart is bought:
    ``app.delayadapters.cancel(result.id)``."""
    log.warning("reminder for %s: %s is waiting", customer, cart)


@app.task(
    bind=True,
    autoretry_for=(PaymentPending,),
    retry_backoff=1,
    retry_backoff_max=60,
    retry_jitter=True,
    max_retries=8,
)
def check_payment(self: Any, order: str) -> None:
    """Asks the bank; every retry waits in Redis, not in this worker: up to 1 s, 2 s, 4 s, …"""
    if self.request.retries < 2:  # the bank hears of it at last
        log.warning("%s is not paid yet", order)
        raise PaymentPending(order)
    log.warning("%s is paid", order)
