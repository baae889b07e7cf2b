"""What vLLM answers without any connector; run by the Python that has vLLM.

python tests/vllm/plain.py MODEL NUM_TOKENS PROMPTS.json ANSWERS.json
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    model, num_tokens, prompts, answers = sys.argv[1:5]
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=int(num_tokens), ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": tokens} for tokens in json.loads(Path(prompts).read_text())]
    outputs = engine.generate(inputs, params, use_tqdm=False)
    Path(answers).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
