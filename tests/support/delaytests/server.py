"""A Redis server of a test's own, to be killed, stopped and brought back."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import redis
import redis.asyncio

from .binaries import default_binary, redis_binaries

__all__ = ["RedisServer", "Tls", "free_port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Tls:
    """Files of a certificate authority and of a server's and a client's certificate."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Tls:
        """Made by trustme for 127.0.0.1 and localhost; one certificate serves both sides."""
        import trustme

        authority = trustme.CA()
        leaf = authority.issue_cert("127.0.0.1", "localhost")
        tls = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        authority.cert_pem.write_to_path(str(tls.ca))
        leaf.private_key_pem.write_to_path(str(tls.key))
        for index, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(tls.cert), append=index > 0)
        return tls


class RedisServer:
    """A server on a free port, its data in a folder of its own; both are gone after the ``with`` block.

    Args:
        binary: path, or a label of ``redis_binaries()``; None: the default one.
        aof: append-only file, with this ``appendfsync``. None: no persistence at all, a killed server forgets.
        unixsocket: listen on a Unix socket as well (:attr:`unix_url`).
        tls: speak TLS on the port, and nothing else. A :class:`Tls`, or True to have one made.
        maxmemory: bytes or ``"64mb"``; the policy is ``noeviction``.
        args: more command-line options, for example ``("--requirepass", "x")``, ``("--replicaof", "127.0.0.1 7001")``.
        password: given to :attr:`url` and the clients (set it in ``args`` too).
    """

    host = "127.0.0.1"

    def __init__(
        self,
        binary: Path | str | None = None,
        *,
        aof: Literal["always", "everysec", "no"] | None = None,
        unixsocket: bool = False,
        tls: Tls | bool = False,
        maxmemory: int | str | None = None,
        args: Sequence[str] = (),
        password: str | None = None,
        port: int | None = None,
    ) -> None:
        self.binary = Path(redis_binaries().get(str(binary), binary)) if binary is not None else default_binary()
        self.port = port or free_port()
        self.password = password
        # A Unix socket's path has about 100 bytes, too few for pytest's own temporary folders.
        self.folder = Path(tempfile.mkdtemp(prefix="delay-redis-"))
        self.tls = Tls.make(self.folder) if tls is True else (tls or None)
        self.socket_path = self.folder / "redis.sock" if unixsocket else None
        self._aof = aof
        self._maxmemory = maxmemory
        self._args = list(args)
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        atexit.register(self.close)

    def _command(self) -> list[str]:
        command = [str(self.binary), "--bind", self.host, "--dir", str(self.folder), "--daemonize", "no"]
        command += ["--logfile", str(self.folder / "redis.log"), "--save", "", "--databases", "16"]
        if self.tls:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "optional"]
            command += ["--tls-ca-cert-file", str(self.tls.ca)]
            command += ["--tls-cert-file", str(self.tls.cert), "--tls-key-file", str(self.tls.key)]
        else:
            command += ["--port", str(self.port)]
        if self.socket_path:
            command += ["--unixsocket", str(self.socket_path)]
        if self._aof:
            command += ["--appendonly", "yes", "--appendfsync", self._aof]
        if self._maxmemory is not None:
            command += ["--maxmemory", str(self._maxmemory), "--maxmemory-policy", "noeviction"]
        return command + self._args

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    def start(self, *, wait: bool = True) -> RedisServer:
        """Start, or start again on the same port and data. ``wait``: until it answers PING (its data is loaded)."""
        assert not self.running, "the server is running"
        with (self.folder / "redis.out").open("wb") as out:
            self._process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if wait:
            self.wait_ready()
        return self

    restart = start

    def wait_ready(self, timeout: float = 60) -> None:
        """Until the server answers PING with anything but "loading"; an ACL's refusal is an answer too."""
        deadline = time.monotonic() + timeout
        while True:
            assert self.running, f"redis-server ended:\n{self.log()}"
            probe = redis.Redis(**self._connection(), socket_timeout=2, socket_connect_timeout=2)
            try:
                probe.ping()
                return
            except (redis.exceptions.BusyLoadingError, OSError) as error:
                last: Exception = error
            except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError):
                return
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                last = error
            except redis.exceptions.ResponseError:
                return
            finally:
                probe.close()
            assert time.monotonic() < deadline, f"redis-server gave no answer in {timeout} s: {last!r}\n{self.log()}"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL: what was not on disk is lost."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def stop(self, timeout: float = 10) -> None:
        """An orderly shutdown (SIGTERM)."""
        if self._process is None or not self.running:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Any:
        """``with server.paused():``"""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """Kill the server, close the clients made by :meth:`client`, remove the data."""
        self.kill()
        for client in self._clients:
            client.close()
        self._clients.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> RedisServer:
        return self.start() if not self.running else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self) -> str:
        """The end of what the server said."""
        logs = [self.folder / name for name in ("redis.out", "redis.log")]
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs if log.exists())

    @property
    def url(self) -> str:
        """``redis://…/0``, or ``rediss://`` with the certificates as parameters."""
        secret = f":{self.password}@" if self.password else ""
        if self.tls is None:
            return f"redis://{secret}{self.host}:{self.port}/0"
        return (
            f"rediss://{secret}{self.host}:{self.port}/0?ssl_ca_certs={self.tls.ca}"
            f"&ssl_certfile={self.tls.cert}&ssl_keyfile={self.tls.key}"
        )

    @property
    def unix_url(self) -> str:
        assert self.socket_path is not None, "pass unixsocket=True"
        return f"unix://{f':{self.password}@' if self.password else ''}{self.socket_path}?db=0"

    def _connection(self) -> dict[str, Any]:
        options: dict[str, Any] = {"host": self.host, "port": self.port, "password": self.password}
        if self.tls:
            options |= {"ssl": True, "ssl_ca_certs": str(self.tls.ca)}
            options |= {"ssl_certfile": str(self.tls.cert), "ssl_keyfile": str(self.tls.key)}
        return options

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client (bytes in, bytes out), closed with the server."""
        client = redis.Redis(**(self._connection() | {"socket_timeout": 10} | options))
        self._clients.append(client)
        return client

    def async_client(self, **options: Any) -> redis.asyncio.Redis:
        """An asyncio client; the caller closes it with ``aclose()``."""
        return redis.asyncio.Redis(**(self._connection() | {"socket_timeout": 10} | options))
