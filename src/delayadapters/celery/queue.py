"""The delay queue of a Celery app: a DelayQueue that knows that its jobs are tasks."""

from __future__ import annotations

from celery import Celery

from ..jobs import Outcome, State
from ..redis.sync import DelayQueue
from .cancelled import announce_cancelled

__all__ = ["TaskQueue"]


class TaskQueue(DelayQueue):
    """``app.delayadapters``. A job's id is the task's id."""

    app: Celery | None = None

    def cancel(self, id: str) -> Outcome:
        """Cancels a waiting task for good (see ``DelayQueue.cancel``), and says so, as a revoke would.

        After CANCELLED its result is REVOKED, a chord that waits for it fails like with any failed member, and
        ``task_revoked`` and ``task_delay_cancelled`` were sent, in this process. When the result backend cannot be
        told, that is logged; the task is cancelled all the same.
        """
        job = self.get(id)
        outcome = super().cancel(id)
        if outcome is Outcome.CANCELLED and job is not None and self.app is not None:
            announce_cancelled(self.app, job)
        return outcome

    def revoke(self, id: str) -> bool:
        """:meth:`cancel` at the price of a look when nothing waits under that id. Answers whether it was cancelled."""
        job = self.get(id)
        if job is None or job.state is not State.WAITING or super().cancel(id) is not Outcome.CANCELLED:
            return False
        if self.app is not None:
            announce_cancelled(self.app, job)
        return True
