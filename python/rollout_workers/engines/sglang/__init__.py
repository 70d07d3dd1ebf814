"""SGLang as an engine of inference workers (``engine.kind = "sglang"``), and ``SGLangWorker`` with
RLinf's interface. Importing this package imports neither torch nor SGLang."""

from rollout_workers.engines.sglang.worker import SequenceGroup, SGLangWorker

__all__ = ["SGLangWorker", "SequenceGroup"]
