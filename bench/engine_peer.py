"""vLLM as the peer of `bench/engine.py`, with its default kernels for CPUs.

The first line of the input has the model, prompts, and lengths as JSON. Each later line samples
everything once.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.stdin.readline())
    prompts, lengths = asked["prompts"], asked["lengths"]
    longest = max(len(prompt) for prompt in prompts) + max(lengths)
    model = LLM(
        asked["folder"], dtype="float32", max_model_len=longest, max_num_seqs=asked["slots"], enable_prefix_caching=False,
        skip_tokenizer_init=True, disable_log_stats=True,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False) for length in lengths]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    print("peer: ready", flush=True)
    for _ in sys.stdin:
        outputs = model.generate(inputs, params, use_tqdm=False)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == sum(lengths)
        print("peer: done", flush=True)


if __name__ == "__main__":
    main()
