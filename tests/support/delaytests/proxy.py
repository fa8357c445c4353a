"""A TCP proxy that a test can cut, hang and close: the network, under control."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType

__all__ = ["Cut", "CuttableProxy"]

Predicate = Callable[[bytes], bool]


class Cut:
    """One planned cut: how often it still happens, and whether it did."""

    def __init__(self, predicate: Predicate, times: int, *, deliver: bool) -> None:
        self.predicate = predicate
        self.deliver = deliver
        self.happened = 0
        self._left = times
        self._event = threading.Event()

    def take(self, request: bytes) -> bool:
        """Whether this request is the one (called under the proxy's lock)."""
        if self._left > 0 and self.predicate(request):
            self._left -= 1
            return True
        return False

    def begin(self) -> None:
        """Counted before the client can notice, so that whoever got an error finds it counted."""
        self.happened += 1

    def done(self) -> None:
        self._event.set()

    def wait(self, timeout: float = 30) -> None:
        """Until the connection was cut (the first time)."""
        assert self._event.wait(timeout), f"no request of the kind to be cut came within {timeout} s"


class CuttableProxy:
    """Listens on a free port of 127.0.0.1 and forwards to ``host:port``; ``with CuttableProxy(port) as proxy:``.

    * :meth:`cut` closes the connections now; :meth:`refuse` lets nobody connect; :meth:`down` does both.
    * :meth:`cut_reply_after` carries a request to the server and drops the connection instead of the reply.
    * :meth:`cut_request` drops the connection instead of the request.
    * :meth:`hang` forwards nothing more, connections stay open.
    * :meth:`resume` ends hanging and refusing.

    :attr:`connections` made so far, :attr:`open` ones, bytes :attr:`to_server` and :attr:`to_client`, and
    :attr:`commands`, what clients sent by upper-case name (RESP arrays only).
    """

    host = "127.0.0.1"

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._state = threading.Condition()
        self._hanging = False
        self._closed = False
        self._cuts: list[Cut] = []
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self.connections = 0
        self.to_server = 0
        self.to_client = 0
        self.commands: Counter[str] = Counter()
        self.port = 0
        self._listen()

    # ------------------------------------------------------------------------------------------------ for the test

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def open(self) -> int:
        with self._state:
            return len(self._links)

    def cut(self) -> int:
        """Close every open connection on both sides; answers how many."""
        with self._state:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def cut_reply_after(self, predicate: Predicate, times: int = 1) -> Cut:
        """The next request for which ``predicate(request bytes)`` is true reaches the server, and is carried out; when
        its reply arrives the client's connection is dropped instead. ``Cut.wait()`` waits for that."""
        return self._plan(Cut(predicate, times, deliver=True))

    def cut_request(self, predicate: Predicate, times: int = 1) -> Cut:
        """The next such request never reaches the server: the connection is dropped instead."""
        return self._plan(Cut(predicate, times, deliver=False))

    def hang(self) -> None:
        """Forward nothing more, in either direction; connecting still works."""
        with self._state:
            self._hanging = True

    def refuse(self) -> None:
        """Refuse new connections; open ones go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # close() alone leaves the accept() of the other thread, and with it the port, open.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def down(self) -> None:
        """Refuse new connections and cut the open ones: the server is gone, as far as clients can tell."""
        self.refuse()
        self.cut()

    def resume(self) -> None:
        """Forward again (what was held back first), and accept again on the same port."""
        with self._state:
            self._hanging = False
            self._state.notify_all()
        if self._listener is None and not self._closed:
            self._listen()

    def close(self) -> None:
        self._closed = True
        with self._state:
            self._cuts.clear()
            self._state.notify_all()
            links = list(self._links)
        self.down()
        for link in links:
            link.thread.join(5)

    def __enter__(self) -> CuttableProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------------- machinery

    def _plan(self, cut: Cut) -> Cut:
        with self._state:
            self._cuts.append(cut)
        return cut

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._state:
                self.connections += 1
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(self, client, server)
            with self._state:
                self._links.add(link)
            link.thread.start()

    def wait_flowing(self, link: _Link) -> None:
        """Holds a link's thread while the proxy hangs."""
        with self._state:
            self._state.wait_for(lambda: not self._hanging or self._closed or link.gone)

    def planned(self, request: bytes) -> Cut | None:
        with self._state:
            return next((cut for cut in self._cuts if cut.take(request)), None)

    def count(self, *, to_server: int = 0, to_client: int = 0, commands: list[str] | None = None) -> None:
        with self._state:
            self.to_server += to_server
            self.to_client += to_client
            self.commands.update(commands or ())

    def forget(self, link: _Link) -> None:
        with self._state:
            self._links.discard(link)

    def wake(self) -> None:
        with self._state:
            self._state.notify_all()


class _Link:
    """One client's connection and its counterpart to the server, served by one thread."""

    def __init__(self, proxy: CuttableProxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.gone = False
        self._request = b""  # since the last reply: what predicates see
        self._parser = _Commands()
        self._cut: Cut | None = None
        self.thread = threading.Thread(target=self._run, name="proxy-link", daemon=True)

    def cut(self) -> None:
        self.gone = True
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        self.proxy.wake()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.client, selectors.EVENT_READ, self._from_client)
                selector.register(self.server, selectors.EVENT_READ, self._from_server)
                while not self.gone and all(key.data() for key, _ in selector.select()):
                    pass
        except OSError:
            pass
        finally:
            self.proxy.forget(self)
            if self._cut is not None:
                self._cut.begin()
            _reset(self.client) if self.gone or self._cut else self.client.close()
            self.server.close()
            if self._cut is not None:
                self._cut.done()

    def _from_client(self) -> bool:
        data = self.client.recv(1 << 16)
        self.proxy.wait_flowing(self)
        if not data or self.gone:
            return False
        self._request += data
        if self._cut is None:
            self._cut = self.proxy.planned(self._request)
            if self._cut is not None and not self._cut.deliver:
                return False
        self.server.sendall(data)
        self.proxy.count(to_server=len(data), commands=self._parser.feed(data))
        return True

    def _from_server(self) -> bool:
        data = self.server.recv(1 << 16)
        self.proxy.wait_flowing(self)
        if not data or self.gone or self._cut is not None:
            return False
        self._request = b""
        self.client.sendall(data)
        self.proxy.count(to_client=len(data))
        return True


class _Commands:
    """The names of the commands in a stream of RESP requests."""

    def __init__(self) -> None:
        self._buffer = b""
        self._skip = 0  # bytes of a value still to come
        self._left = 0  # arguments still to come
        self._name = False  # the next value is a command's name

    def feed(self, data: bytes) -> list[str]:
        self._buffer += data
        names: list[str] = []
        while True:
            if self._skip:
                dropped = min(self._skip, len(self._buffer))
                self._buffer = self._buffer[dropped:]
                self._skip -= dropped
                if self._skip:
                    return names
            line, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                return names
            if self._left == 0:
                if not line.startswith(b"*"):  # inline command, or something that is not Redis
                    self._buffer = rest
                    continue
                self._left, self._name, self._buffer = int(line[1:]), True, rest
                continue
            length = int(line[1:])
            if self._name:
                if len(rest) < length:
                    return names
                names.append(rest[:length].decode(errors="replace").upper())
                self._name = False
            self._buffer = rest
            self._skip = length + 2
            self._left -= 1


def _reset(side: socket.socket) -> None:
    """Close with a reset, as a broken connection shows itself."""
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()
