"""Two instances in one process: a prompt is "prefilled" on tp2 and handed over to tp1, by shared memory."""

import numpy as np

from baton.plan import Cache, Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.plan.ownership import buffers
from baton.session import Aux, Endpoint, EndpointConfig, Request, prompt_digest
from baton.transport import open_transport

LAYERS, HEADS, CHANNELS, PAGE_TOKENS, NUM_PAGES = 4, 2, 8, 16, 32
CACHE = Cache(LAYERS, Paged(HEADS, CHANNELS).components(((0, LAYERS),)))
STORAGE = Storage(page_tokens=PAGE_TOKENS, dtype="fp32", num_pages_default=NUM_PAGES)
SECRET = b"peers without this secret are refused"


class Rank:
    """An endpoint and its pools; in production a process of its own. Rank 0 hosts the coordinator."""

    def __init__(self, instance: str, spec: Spec, rank: int, first: "Rank | None") -> None:
        transport = open_transport("shm")
        pools = {name: transport.allocate(size) for name, size in buffers(spec, rank, "pool").items()}
        config = EndpointConfig(instance=instance, spec=spec, rank=rank, secret=SECRET)
        if first is not None:
            epoch, coordinator = first.endpoint.config.epoch, first.endpoint.address
            config = EndpointConfig(instance, spec, rank, SECRET, epoch=epoch, coordinator=coordinator)
        self.endpoint = Endpoint(config, pools, transport)
        shape = (LAYERS, NUM_PAGES, -1, PAGE_TOKENS, CHANNELS)
        self.cache = {name: pool.view(np.float32).reshape(shape) for name, pool in pools.items()}


def start(instance: str, layout: str) -> list[Rank]:
    spec, ranks = Spec(parse_layout(layout), CACHE, STORAGE), list[Rank]()
    for rank in range(spec.layout.num_ranks):
        ranks.append(Rank(instance, spec, rank, ranks[0] if ranks else None))
    assert ranks[0].endpoint.wait_ready(30)
    return ranks


prefill, (decode,) = start("prefill", "tp2"), start("decode", "tp1")
prompt, source_pages, target_pages = range(100, 164), [7, 2, 9, 4], [1, 8, 5, 20]
digest = prompt_digest(prompt)
pages = {0: {"tokens": target_pages}}
receiving = decode.endpoint.receive(Request("t1", prefill[0].endpoint.address, digest, pages))
sendings = [rank.endpoint.send("t1", digest) for rank in prefill]
for layer in range(LAYERS):  # each layer is sent as soon as it is computed
    for rank, sending in zip(prefill, sendings, strict=True):
        for part in rank.cache.values():
            part[layer, source_pages] = np.random.rand(*part[layer, source_pages].shape)
        sending.ready((layer, layer + 1), (0, len(prompt)), {"tokens": source_pages})
for sending, aux in zip(sendings, (Aux(tokens=(42,)), None), strict=True):
    sending.commit(aux)  # the rank that sampled passes the first token
print("target:", receiving.wait(10))
for head, rank in enumerate(prefill):
    for name, part in rank.cache.items():
        assert np.array_equal(part[:, source_pages, 0], decode.cache[name][:, target_pages, head])
print("every byte is equal")
for rank in (*prefill, decode):
    rank.endpoint.close()
