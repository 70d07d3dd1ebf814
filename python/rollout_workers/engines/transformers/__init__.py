"""The embedded engine: a decoding loop over a Hugging Face module, on CPU or GPU.

    engine.py           the asyncio interface
    thread.py stream.py one decoding thread, one event-loop wake-up per step
    decoder.py          admit, step, finish
    slots.py sample.py  samples in flight
    prefill.py          prompts that run together
    kv.py               dense KV cache, one row per slot
    forward.py          chooses llama.py (Llama, Mistral, Qwen2, Qwen3) or generic.py (the module's own forward)
    attention.py        kinds of attention, and the longest sequence that can be decoded
    row_order.py        the order of slots in a step
    sampler.py          filters, inverse CDF
    philox.py           random number = f(seed, token index)
    text.py             stop strings, streaming
    current_weights.py  stage, load, digest
    determinism.py      the check at the start of deterministic mode

A group's prompt runs once; its KV is copied to the slots of its samples. Free slots cost nothing:
samples are moved to the lowest slots, and rows of similar length stand together, so that a step's
attention reads each stretch up to its own longest.

Deterministic mode promises that a request and a seed give the same tokens and logprobs, bit for
bit, whatever else is in the engine, whichever slot it lands in, whatever was there before. What
that takes, as measured with torch 2.15 on CPU (MKL 2024.2, AVX-512, the 0.8 M parameter model and
the shapes of SmolLM2-135M, 4 to 260 rows, one and two threads):

- A row of a GEMM has the same bits in every position and with any other rows, also at odd row
  counts. But its bits differ with the number of rows: 1 to 4 rows differ from 8 and more, and with
  a long inner dimension (1536) 8, 16, 32 and 128 all differ, as do one and two threads. So a step
  runs whole blocks of ``block_rows`` slots, a prefill pass has the rows and the padded length of
  the prompt's own bucket, and the thread count is part of the result.
- SDPA has the same bits for a row whatever rows it is called with, but other bits for another KV
  length, though the rest is masked. So a row reads its own length class (row_order.py), which
  follows from its position alone. A masked NaN leaks (0 * NaN), so the cache starts at zero, and a
  slot that saw a number that is not finite is zeroed.
- On AMD processors (Zen 5) with two threads this needs ``MKL_CBWR=AUTO`` in the environment before
  MKL's first product (workers set it): else the bits of its small products depend on where the
  operands lie, which differs by thread.
- softmax, log_softmax, cumsum and sort work row by row. A row that no filter and no temperature
  touches must take its raw logprobs, not a second log_softmax of them. Element-wise exp-like
  kernels (SiLU) treat the last numel % 32 elements differently: harmless where the inner size is a
  multiple of 32.

None of this is guaranteed on another machine, so a deterministic engine first runs one probe in
every row of a block, next to copies of itself and next to random rows, and refuses to start
(``ModelUnsupported``) if a bit differs.
"""

from rollout_workers.engines.transformers.config import EngineConfig
from rollout_workers.engines.transformers.engine import TransformersEngine

__all__ = ["EngineConfig", "TransformersEngine"]
