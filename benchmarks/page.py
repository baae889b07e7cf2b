"""What readers of the router's page cost it: processor time of a request with and without them, in turns.

100 dummy instances behind one router, 16 requests at once. A reader is a connection to `/events` that reads
all it gets, as a browser does. Without requests, what is left are polls of the instances and the page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from statistics import median
from urllib.parse import urlsplit

import dummy_instances
from deployments import BenchProcesses
from load_generator import send_burst

from baton.supervisor import ChildProcess

NUM_INSTANCES, NUM_READERS, CONCURRENCY, BURST_S = 100, 3, 16, 4.0


async def read_page(url: str, sizes: list[int]) -> None:
    """Reads the page's events until it is cancelled."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET /events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    try:
        while data := await reader.read(1 << 20):
            sizes.append(len(data))
    finally:
        writer.close()


async def measure(url: str, router: ChildProcess, rounds: int) -> None:
    costs: dict[int, list[float]] = {0: [], NUM_READERS: []}
    idle: dict[int, list[float]] = {0: [], NUM_READERS: []}
    rates: dict[int, list[float]] = {0: [], NUM_READERS: []}
    sizes: list[int] = []
    await send_burst(url, CONCURRENCY, BURST_S, is_streamed=True)
    for number in range(2 * rounds):
        num_readers = NUM_READERS if number % 4 in (1, 2) else 0
        readers = [asyncio.create_task(read_page(url, sizes)) for _ in range(num_readers)]
        await asyncio.sleep(1.0)
        before_s = router.cpu_s()
        await asyncio.sleep(BURST_S)
        idle[num_readers].append((router.cpu_s() - before_s) / BURST_S)
        before_s = router.cpu_s()
        burst = await send_burst(url, CONCURRENCY, BURST_S, is_streamed=True)
        costs[num_readers].append((router.cpu_s() - before_s) / burst.num_ok)
        rates[num_readers].append(burst.per_s)
        assert not burst.num_failed, f"{burst.num_failed} requests failed"
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    for count, used in costs.items():
        print(
            f"{count} readers: {median(used) * 1e6:.0f} us a request, {median(rates[count]):.0f} "
            f"requests/s, {median(idle[count]):.1%} of a core without requests"
        )
    pairs = list(zip(costs[NUM_READERS], costs[0], strict=True))
    print(f"ratio {median(some / none for some, none in pairs):.3f}; {sum(sizes) / 2**20:.1f} MiB of events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    with BenchProcesses() as processes:
        registry = processes.start_registry()
        half = str(NUM_INSTANCES // 2)
        words = ["--num-prefill", half, "--num-decode", half, "--registry", registry]
        words += ["--secret-file", str(processes.secret_file)]
        dummies = processes.start("dummies", [sys.executable, dummy_instances.__file__, *words])
        while not dummies.read_line().startswith("dummies at "):
            pass
        url, router = processes.start_router(registry, ["--log-level", "warning"])
        asyncio.run(measure(url, router, rounds))
    print(f"load averages {os.getloadavg()}")


if __name__ == "__main__":
    main()
