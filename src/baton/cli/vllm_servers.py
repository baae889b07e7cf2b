"""The servers of `baton up --engine vllm`: their layouts, ports, devices and command lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from baton.errors import ConfigError
from baton.supervisor import Service, free_port

HOST = "127.0.0.1"
SIZES = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One server, before it is started."""

    role: str
    name: str
    sizes: Mapping[str, int]
    """Of its parallelism: tp, pp and dp, those that are given."""
    port: int
    kv_port: int
    """Of its first engine; the others follow."""
    devices: tuple[str, ...]
    """GPUs that are its own; none on CPUs."""

    @property
    def num_engines(self) -> int:
        return self.sizes.get("dp", 1)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def route_words(self) -> tuple[str, str]:
        """This server as an option of `baton route`."""
        if self.role == "decode":
            return "--decode", self.url
        return "--prefill", f"{self.url},source={HOST}:{self.kv_port},dp={self.num_engines}"

    def service(
        self, program: str, model: str, connector: Mapping[str, object], args: Sequence[str]
    ) -> Service:
        """`vllm serve` with the connector; `args` are vLLM's own options."""
        is_prefill = self.role == "prefill"
        options = {**connector, **({"ungranted_share_max": 1.0} if is_prefill else {})}
        transfer = {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.adapters.vllm",
            "kv_role": "kv_producer" if is_prefill else "kv_consumer",
            "kv_port": self.kv_port,
            "engine_id": self.name,
            "kv_connector_extra_config": options,
        }
        sizes = [word for name, size in self.sizes.items() for word in (SIZES[name], str(size))]
        words = ("serve", model, "--host", HOST, *sizes, "--kv-transfer-config", json.dumps(transfer), *args)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}
        return Service(self.name, words, "", self.port, program=program, env=env)


def parse_sizes(option: str, layout: str) -> dict[str, int]:
    """The sizes of a layout like tp2 or dp2.pp2.tp2."""
    sizes: dict[str, int] = {}
    for part in layout.split("."):
        match = re.fullmatch(r"(tp|pp|dp)([1-9][0-9]{0,3})", part)
        if match is None or match[1] in sizes:
            raise ConfigError(
                f"{option} {layout!r} is not a layout of vLLM; write it like tp2 or dp2.pp2.tp2"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def plan_servers(instances: Sequence[tuple[str, str, str]], devices: Sequence[str]) -> list[VllmServer]:
    """Ports and devices for (role, name, layout) of every server; raises where there are not enough."""
    parsed = [(role, name, parse_sizes(f"--{role}", layout)) for role, name, layout in instances]
    counts = [prod(sizes.values()) for _, _, sizes in parsed]
    if devices and sum(counts) > len(devices):
        raise ConfigError(
            f"the servers need {sum(counts)} GPUs and there are {len(devices)} ({', '.join(devices)}); "
            "use smaller layouts, or start the servers and `baton route` yourself"
        )
    servers, taken = [], set[int]()
    for (role, name, sizes), count in zip(parsed, counts, strict=True):
        num_kv_ports = sizes.get("dp", 1)
        taken.add(port := free_port(taken=taken))
        kv_port = free_port(num_kv_ports, taken)
        taken.update(range(kv_port, kv_port + num_kv_ports))
        own, devices = tuple(devices[:count]), devices[count:]
        servers.append(VllmServer(role, name, sizes, port, kv_port, own))
    return servers
