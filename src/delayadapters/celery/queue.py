"""The delay queue of a Celery app: a DelayQueue that knows that its jobs are tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from celery import Celery

from ..due import check_id
from ..jobs import Job, Outcome, State
from ..redis.sync import DelayQueue
from .cancelled import announce_cancelled

__all__ = ["TaskQueue"]


class TaskQueue(DelayQueue):
    """``app.delayadapters``. A job's id is the task's id."""

    app: Celery | None = None

    @classmethod
    def of(cls, app: Celery, client: Any, name: str, timeout: float) -> TaskQueue:
        """As ``from_url`` makes one, for a client that no URL describes (Sentinel). Closing the queue closes it."""
        # max_payload: Celery has no limit on messages, so neither have we.
        queue = cls(client, name=name, max_payload=None)
        queue._own(timeout)
        queue.app = app
        return queue

    def close(self) -> None:
        """Closes its connections, those to Sentinels as well. Waiting tasks stay in Redis."""
        super().close()
        manager = getattr(self.client.connection_pool, "sentinel_manager", None)
        for sentinel in manager.sentinels if self._owned and manager is not None else ():
            sentinel.close()

    def cancel(self, id: str) -> Outcome:
        """Cancels a waiting task for good (see ``DelayQueue.cancel``), and says so, as a revoke would.

        After CANCELLED its result is REVOKED, a chord that waits for it fails like with any failed member, and
        ``task_revoked`` and ``task_delay_cancelled`` were sent, in this process. So it is after IN_FLIGHT, when a retry
        was cancelled that waited while the release of its task's first run was not acked yet. When the result backend
        cannot be told, that is logged; the task is cancelled all the same.

        A process that is killed between the two leaves the backend untold: a chord that waits for the task then goes
        on waiting, as natively when a worker dies before it has stored a result. (Telling it first would be worse: the
        chord would fail though its task may be on its way already.) ``backend.mark_as_revoked`` closes such a chord.
        """
        job = self.get(id)
        outcome = super().cancel(id)
        if job is not None and self._gone(job, outcome):
            self._announce(job)
        return outcome

    def cancel_many(self, ids: Iterable[str]) -> list[Outcome]:
        """:meth:`cancel` for each of ``ids``; outcomes in their order. Each task is told of, so one by one."""
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"ids must be an iterable of ids, got {ids!r}")
        asked = list(ids)
        for id in asked:
            check_id(id)
        once = {id: self.cancel(id) for id in dict.fromkeys(asked)}
        return [once[id] for id in asked]

    def revoke(self, id: str) -> bool:
        """:meth:`cancel` at the price of a look when nothing waits under that id. Answers whether it was cancelled."""
        job = self.get(id)
        if job is None or job.state is not State.WAITING or not self._gone(job, super().cancel(id)):
            return False
        self._announce(job)
        return True

    def _gone(self, job: Job, outcome: Outcome) -> bool:
        """Whether ``job``, as it was before a cancel with this outcome, has been cancelled by it."""
        if outcome is not Outcome.IN_FLIGHT or job.state is not State.WAITING:
            return outcome is Outcome.CANCELLED
        # Either it was claimed meanwhile, or it was cancelled and what is on its way is another entry of its id.
        left = self.get(job.id)
        if left is None:  # that has been acked: it can only have been this job if that was due
            return job.due > time.time_ns() // 1000
        return left.payload != job.payload

    def _announce(self, job: Job) -> None:
        if self.app is not None:
            announce_cancelled(self.app, job)
