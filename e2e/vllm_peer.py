"""Loads a model's folder with vLLM; run by test_vllm.py in vLLM's environment.

Usage: ``python e2e/vllm_peer.py DIR PROMPTS.json ANSWERS.json``

PROMPTS is a list of texts. ANSWERS gets for each the token ids of the folder's tokenizer, the most
likely next tokens, and their logprobs.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a separate engine process would import everything again
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
NEW_TOKENS = 6


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, asked, answers = sys.argv[1:]
    prompts = json.loads(Path(asked).read_text())
    engine = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True)
    found = []
    for output in engine.generate(prompts, greedy, use_tqdm=False):
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        logprobs = [place[token].logprob for place, token in zip(completion.logprobs, ids, strict=True)]
        found.append({"prompt_ids": list(output.prompt_token_ids), "ids": ids, "logprobs": logprobs})
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
