"""kombu's Redis transport with one hole closed, for the demo's broker (stock Celery's column uses it as well).

kombu takes a message with BRPOP and notes it as unacknowledged with the next command. When the worker or Redis is
killed between the two, that message is gone, whoever has sent it: about one kill in ten loses a task at the demo's
rate. Here BLMOVE puts the message aside in the same step, and the note takes it from there; what is still aside when
a consumer starts goes back to its queue. One queue without priorities is all the demo needs, so this does no more.

``demo.py --plain-kombu`` runs without it.
"""

from __future__ import annotations

from time import time

from kombu.transport import redis, virtual
from kombu.utils.json import dumps, loads

ASIDE = "demo-aside"


class QoS(redis.QoS):
    def append(self, message, delivery_tag):
        delivery = message.delivery_info
        noted = dumps([message._raw, delivery["exchange"], delivery["routing_key"]])
        with self.pipe_or_acquire() as pipe:  # a MULTI: all of it or nothing
            pipe.zadd(self.unacked_index_key, {delivery_tag: time()})
            pipe.hset(self.unacked_key, delivery_tag, noted)
            pipe.lrem(ASIDE, 1, self.channel.taken)
            pipe.execute()
        virtual.QoS.append(self, message, delivery_tag)


class Channel(redis.Channel):
    QoS = QoS
    taken = b""

    def basic_consume(self, queue, *args, **kwargs):
        if queue not in self._fanout_queues:
            with self.conn_or_acquire() as client:
                while client.lmove(ASIDE, queue, "LEFT", "RIGHT"):
                    pass
        return super().basic_consume(queue, *args, **kwargs)

    def _brpop_start(self, timeout=None):
        queues = self._queue_cycle.consume(len(self.active_queues))
        if queues:
            self._in_poll = self.client.connection
            wait = timeout or self.brpop_timeout or 0
            self.client.connection.send_command("BLMOVE", queues[0], ASIDE, "RIGHT", "LEFT", wait)

    def _brpop_read(self, **options):
        try:
            try:
                item = self.client.parse_response(self.client.connection, "BLMOVE", **options)
            except self.connection_errors:
                self.client.connection.disconnect()
                raise
            if not item:
                raise redis.Empty
            self.taken = item
            message = loads(item.decode())
            self.connection._deliver(message, message["properties"]["delivery_info"]["routing_key"])
            return True
        finally:
            self._in_poll = None


class Transport(redis.Transport):
    Channel = Channel
