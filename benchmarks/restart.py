"""How long a killed router of `baton up` takes to answer again, under load.

Clients ask without a pause. SIGKILL to the router; the time until its /health is 200, and until the first
completion of a request that was sent after it, which the instances compute for all clients at once. The
target is 2 s on a quiet machine. A minute lies between two kills, since a service that ends again within a
minute is restarted after a pause.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

from baton.supervisor import DRAIN_S_MAX, ChildProcess, baton_command

START_S_MAX = 600.0
ANSWER_S_MAX = 120.0
BODY = json.dumps({"prompt": "The capital of France is", "max_tokens": 16}).encode()


class Clients:
    """Threads that ask, each with one request at a time on a connection of its own."""

    def __init__(self, url: str, count: int) -> None:
        self.answers: list[tuple[float, float]] = []
        """When a request was sent and answered."""
        self.num_lost = 0
        """Requests without an answer, or with another status than 200."""
        self._where = urlsplit(url).netloc
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._is_over:
            sent_s = monotonic()
            connection = http.client.HTTPConnection(self._where, timeout=ANSWER_S_MAX)
            try:
                connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                is_right = response.status == 200
            except (OSError, http.client.HTTPException):
                is_right = False
            finally:
                connection.close()
            if is_right:
                self.answers.append((sent_s, monotonic()))
            else:
                self.num_lost += 1
                sleep(0.01)

    def first_s(self, since_s: float) -> float:
        """Seconds until the first answer to a request that was sent since then."""
        while monotonic() < since_s + ANSWER_S_MAX:
            if done := [end_s for sent_s, end_s in list(self.answers) if sent_s >= since_s]:
                return min(done) - since_s
            sleep(0.005)
        raise SystemExit(f"no answer for {ANSWER_S_MAX:g} s after the router was killed")

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()


def health_s(url: str, since_s: float) -> float:
    """Seconds until the router says that requests are answered."""
    while monotonic() < since_s + ANSWER_S_MAX:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S_MAX)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            if status == 200:
                return monotonic() - since_s
        sleep(0.005)
    raise SystemExit(f"/health was not 200 for {ANSWER_S_MAX:g} s after the router was killed")


def router_pid(parent: int) -> int:
    """Of the router that this `baton up` has started last."""
    for entry in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{entry}/status").read_text()
        except OSError:
            continue
        if words[1:4] == [b"-m", b"baton", b"route"] and f"PPid:\t{parent}\n" in status:
            return entry
    raise SystemExit("baton up has no router")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=61.0)
    given = parser.parse_args()
    words = ("up", "--model", given.model, "--prefill", "tp1", "--decode", "tp1", "--port", "0")
    up = ChildProcess("up", baton_command(*words, "--log-level", "warning"), death_signal=signal.SIGINT)
    try:
        url = up.wait_line(f"serving {given.model} at ", START_S_MAX)
        clients = Clients(url, given.clients)
        try:
            for number in range(given.kills):
                sleep(given.pause_s)
                num_lost, before = clients.num_lost, os.getloadavg()
                os.kill(router_pid(up.pid), signal.SIGKILL)
                killed_s = monotonic()
                ready_s, first_s = health_s(url, killed_s), clients.first_s(killed_s)
                lost = clients.num_lost - num_lost
                loads = ", ".join(f"{each:.1f}" for each in before)
                times = f"/health {ready_s:.2f} s, completion {first_s:.2f} s"
                print(f"kill {number}: {times}; {lost} requests lost; loads {loads}", flush=True)
        finally:
            clients.close()
        print(f"{len(clients.answers)} answers")
    finally:
        up.close(DRAIN_S_MAX)


if __name__ == "__main__":
    main()
