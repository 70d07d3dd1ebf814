"""The embedded engine: a decoding loop over a Hugging Face module, on CPU or GPU.

    engine.py           the asyncio interface
    thread.py stream.py one decoding thread, one event-loop wake-up per step
    decoder.py          admit, step, finish
    slots.py sample.py  samples in flight
    prefill.py          prompts that run together
    prefixes.py         KV of earlier prompts and samples, by tokens
    edits.py            bias, penalties, minimum lengths
    constraint.py       structured output
    kv.py               dense KV cache, one row per slot
    forward.py          chooses llama.py (Llama, Mistral, Qwen2, Qwen3) or generic.py (the module's own forward)
    attention.py        kinds of attention, and the longest sequence that can be decoded
    row_order.py        the order of slots in a step
    sampler.py          filters, inverse CDF
    philox.py           random number = f(seed, token index)
    text.py             stop strings, streaming
    current_weights.py  stage, load, digest
    determinism.py      the check at the start of deterministic mode

A group's prompt runs once; its KV is copied to the slots of its samples. A prompt that begins like
an earlier prompt or sample reuses its KV, and a long prompt is computed in parts between decoding
steps. Free slots cost nothing:
samples are moved to the lowest slots, and rows of similar length are adjacent, so a step's
attention reads each run of rows only up to its longest row.

In deterministic mode a request and a seed give the same tokens and logprobs, bit for bit,
independent of other requests, of the slot, and of earlier contents of the slot. The requirements
were measured with torch 2.15 on CPU (MKL 2024.2, AVX-512, the 0.8 M parameter model and the shapes
of SmolLM2-135M, 4 to 260 rows, one and two threads):

- The bits of a row of a GEMM do not depend on its position or on other rows, even for odd row
  counts. But they depend on the number of rows: 1 to 4 rows differ from 8 and more, and with a long
  inner dimension (1536) 8, 16, 32, and 128 all differ, as do one and two threads. So a step
  computes whole blocks of ``block_rows`` slots, a prefill pass has the rows and the padded length
  of the prompt's bucket, and the thread count is part of the result.
- The bits of a row of SDPA do not depend on the number of rows, but on the KV length, even if the
  additional positions are masked. So a row reads its own length class (row_order.py), which depends
  only on its position. A masked NaN is not ignored (0 * NaN is NaN), so the cache is initialized
  with zeros, and a slot with a non-finite number is set to zero.
- On AMD processors (Zen 5) with two threads this needs ``MKL_CBWR=AUTO`` in the environment before
  MKL's first product (workers set it). Otherwise the bits of its small products depend on the
  alignment of the operands, which differs between threads.
- softmax, log_softmax, cumsum, and sort work row by row. A row without filters and with temperature
  1 must reuse its raw logprobs instead of computing log_softmax again. Element-wise kernels such as
  SiLU treat the last numel % 32 elements differently, which is harmless if the inner size is a
  multiple of 32.

None of this is guaranteed on other machines. So a deterministic engine first computes one probe in
every row of a block, next to copies of itself and next to random rows, and does not start
(``ModelUnsupported``) if a bit differs.
"""

from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.engines.transformers.engine import TransformersEngine

__all__ = ["EngineConfig", "TransformersEngine"]
