"""A prompt that SGLang prefills and Baton's own engine decodes; docs/sglang.md says how to start the two.

python examples/sglang_to_baton.py --prefill http://127.0.0.1:30000 --source 127.0.0.1:9000 \
    --decode http://127.0.0.1:30001 "Once upon a time"

Both servers get the same request at once, as from a router: the room names the transfer, and `--source` is
where Baton's coordinator inside of SGLang listens. SGLang answers with the first token, Baton with them all.
"""

import argparse
import json
import secrets
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def generate(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True, help="URL of SGLang")
    parser.add_argument("--source", required=True, help="HOST:PORT of its coordinator")
    parser.add_argument("--decode", required=True, help="URL of Baton")
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
        halves = [pool.submit(generate, url, body) for url in (args.prefill, args.decode)]
        first, answer = (half.result() for half in halves)
    print(f"SGLang prefilled {first['meta_info']['prompt_tokens']} tokens; Baton answers:")
    print(answer["text"])


if __name__ == "__main__":
    main()
