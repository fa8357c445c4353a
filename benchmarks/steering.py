"""What another client's PING sees while ``delayadapters cancel --name X`` goes through a long queue.

    .envs/core8/bin/python benchmarks/steering.py [--jobs 200000]

Beside it, in the same run, the same client with nothing else going on: on a shared machine that is what a PING costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from harness import server

from delayadapters import DelayQueue, NewJob

CHUNK = 20_000


def ping(port: int, ready: Connection, stop: Any) -> None:
    """One PING after the other, a millisecond apart; sends the milliseconds each took."""
    taken: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ready.send(None)
        while not stop.is_set():
            began = time.perf_counter()
            connection.sendall(b"PING\r\n")
            connection.recv(64)
            taken.append((time.perf_counter() - began) * 1000)
            time.sleep(0.001)
    ready.send(taken)


def beside(port: int, what: list[str] | None, seconds: float = 3.0) -> tuple[list[float], float, str]:
    """PINGs while a command runs (or nothing, for so long); how long that took, and what it said."""
    ours, theirs = multiprocessing.Pipe()
    stop = multiprocessing.Event()
    process = multiprocessing.Process(target=ping, args=(port, theirs, stop))
    process.start()
    ours.recv()
    began = time.perf_counter()
    said = ""
    if what is None:
        time.sleep(seconds)
    else:
        said = subprocess.run(what, check=True, capture_output=True, text=True).stdout.strip()
    taken = time.perf_counter() - began
    stop.set()
    pings: list[float] = ours.recv()
    process.join()
    return pings, taken, said


def line(what: str, pings: list[float], rest: str = "") -> str:
    p99 = statistics.quantiles(pings, n=100)[98]
    return f"{what:<32} p50 {statistics.median(pings):6.2f}  p99 {p99:6.2f}  worst {max(pings):7.2f} ms  {rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000)
    jobs = parser.parse_args().jobs
    with server() as port:
        url = f"redis://127.0.0.1:{port}/0"
        with DelayQueue.from_url(url, name="bench") as queue:
            for start in range(0, jobs, CHUNK):
                queue.schedule_many(
                    NewJob(b"x" * 300, delay=3600 + n % 5000, meta={"task": "x"})
                    for n in range(start, min(jobs, start + CHUNK))
                )
            print(line("nothing else", beside(port, None)[0]))
            command = [sys.executable, "-m", "delayadapters.cli", "--url", url, "--name", "bench"]
            for verb in (["reschedule", "--name", "x", "--delay", "9h"], ["cancel", "--name", "x"]):
                queue.client.config_resetstat()
                pings, taken, said = beside(port, [*command, *verb, "--yes"])
                spent = queue.client.info("commandstats")["cmdstat_evalsha"]
                rest = f"{said} in {taken:.1f} s; {spent['calls']} scripts, {spent['usec_per_call']} µs each"
                print(line(" ".join(verb[:3]), pings, rest))


if __name__ == "__main__":
    main()
