"""SGLang's server with what its CPU engine lacks for models with sliding windows.

Its `torch_native` attention reads a layer with a window by the slots of the full pool, and stores by those of
the window. Every process that SGLang spawns imports this module anew.
"""

import runpy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Native


def by_own_slots(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(backend: Any, q: Any, k: Any, v: Any, layer: Any, *given: Any, **more: Any) -> Any:
        pool, requests = backend.token_to_kv_pool, backend.req_to_token_pool
        if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return original(backend, q, k, v, layer, *given, **more)
        slots = pool.translate_loc_from_full_to_swa(requests.req_to_token)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
        try:
            return original(backend, q, k, v, layer, *given, **more)
        finally:
            backend.req_to_token_pool = requests

    return forward


Native.forward_extend = by_own_slots(Native.forward_extend)
Native.forward_decode = by_own_slots(Native.forward_decode)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
