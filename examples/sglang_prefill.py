"""SGLang prefills a prompt and another engine decodes it; docs/sglang.md says how to start the two.

python examples/sglang_prefill.py --prefill http://127.0.0.1:30000 --source 127.0.0.1:9000 \
    --decode http://127.0.0.1:30001 --engine baton "Once upon a time"

Both servers get the same request at once, as from a router. The room is the id of the transfer, and
`--source` is the address of Baton's coordinator inside SGLang. SGLang answers with the first token, the other
engine with all of them.
"""

import argparse
import json
import secrets
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return json.load(response)


def decode_on_baton(url: str, body: dict[str, Any], source: str) -> str:
    """Baton accepts requests of SGLang's form, and gets the prompt from the bootstrap address."""
    return str(ask(f"{url}/generate", body)["text"])


def decode_on_vllm(url: str, body: dict[str, Any], source: str) -> str:
    """vLLM gets the transfer and its source in kv_transfer_params."""
    params = {"do_remote_prefill": True, "transfer_id": str(body["bootstrap_room"]), "source": source}
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    sampling = {"temperature": 0, "max_tokens": body["sampling_params"]["max_new_tokens"]}
    asked = {"model": model, "prompt": body["text"], **sampling, "kv_transfer_params": params}
    return str(ask(f"{url}/v1/completions", asked)["choices"][0]["text"])


ENGINES = {"baton": decode_on_baton, "vllm": decode_on_vllm}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True, help="URL of the SGLang server")
    parser.add_argument("--source", required=True, help="HOST:PORT of Baton's coordinator in SGLang")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    parser.add_argument("--engine", choices=ENGINES, default="baton", help="engine of the decode server")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompt")
    args = parser.parse_args()
    host, _, port = args.source.rpartition(":")
    body = {
        "text": args.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": args.max_tokens},
        "bootstrap_host": host,
        "bootstrap_port": int(port),
        "bootstrap_room": secrets.randbits(62),
    }
    with ThreadPoolExecutor() as pool:
        prefilled = pool.submit(ask, f"{args.prefill}/generate", body)
        decoded = pool.submit(ENGINES[args.engine], args.decode, body, args.source)
        first, text = prefilled.result(), decoded.result()
    print(f"SGLang prefilled {first['meta_info']['prompt_tokens']} tokens; {args.engine} answers:")
    print(text)


if __name__ == "__main__":
    main()
