"""``manage.py order ada --remind-after 3600``; with ``--refused`` the transaction is rolled back."""

from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction
from shop.celery import app

from orders.models import Order
from orders.tasks import confirm, remind


class Refused(Exception):
    """The bank said no."""


class Command(BaseCommand):
    help = "Takes an order, and schedules a reminder when it is committed."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("customer")
        parser.add_argument("--remind-after", type=float, default=3600)
        parser.add_argument("--refused", action="store_true")

    def handle(self, *, customer: str, remind_after: float, refused: bool, **options: Any) -> None:
        try:
            with transaction.atomic():
                order = Order.objects.create(customer=customer)
                confirm.delay_on_commit(order.pk)
                remind.apply_async_on_commit((order.pk,), countdown=remind_after)
                self.stdout.write(f"{customer}: in the transaction {waiting()} reminders wait")
                if refused:
                    raise Refused
        except Refused:
            self.stdout.write(f"{customer}: rolled back, {waiting()} reminders wait")
        else:
            self.stdout.write(f"{customer}: committed, {waiting()} reminders wait")


def waiting() -> int:
    return app.delayadapters.stats().waiting
