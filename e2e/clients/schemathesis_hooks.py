"""Hooks of Schemathesis (``SCHEMATHESIS_HOOKS``): most generated requests get the values that only
this gateway knows, so that they reach the policy, and every request that was sent is recorded.

Environment: ``FUZZED_MODEL``, the served model; ``FUZZED_RESPONSE``, the id of a stored response;
``FUZZED_LOG``, the file that gets a JSON object for each request."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

MODEL, RESPONSE, LOG = (os.environ[f"FUZZED_{name}"] for name in ("MODEL", "RESPONSE", "LOG"))
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
FUTURE = ("min_weights_version", "min_weight_version", "x-rollout-min-weights-version")
"""Fields and headers that wait for weights, which never come: 503 with WEIGHTS_NOT_REACHED."""
TURN = {"role": "user", "content": "count"}
VALID = {
    "messages": [TURN],
    "prompt": "count",
    "input": [TURN],
    "text": "count",
    "token_ids": [65, 66],
    "tokens": [65, 66],
    "sampling_params": {"max_tokens": 4},
    "previous_response_id": RESPONSE,
}
"""Values of fields whose schema allows more than the gateway does."""


def chance(value: object) -> int:
    """A number below 100 that the value determines, so that a failure can be repeated."""
    return zlib.crc32(repr(value).encode()) % 100


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Name the served model in nine of ten objects, replace some further fields by valid values,
    and keep completions short. Wait for no weights. The other bodies stay as they were
    generated."""
    if not isinstance(body, dict) or chance(body) < 10:
        return body
    body = {"model": MODEL} | body | ({"model": MODEL} if "model" in body else {})
    for name in LENGTHS:
        if isinstance(body.get(name), int) and body[name] > 8:
            body[name] = 8
    for name in FUTURE:
        if isinstance(body.get(name), int) and body[name] > 0:
            body[name] = 0
    for name, value in VALID.items():
        if name in body and chance((name, body)) < 70:
            body[name] = value
    return body


@schemathesis.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> Any:
    """Name the stored response, the model, and a valid session in most paths that have one."""
    if not path_parameters:
        return path_parameters
    known = {"id": RESPONSE, "model": MODEL, "session": "fuzzed"}
    return {name: known.get(name, value) if chance((name, value)) < 70 else value for name, value in path_parameters.items()}


@schemathesis.hook
def map_headers(context: schemathesis.HookContext, headers: Any) -> Any:
    """Wait for no weights."""
    if not headers:
        return headers
    return {name: "0" if name in FUTURE and str(value).isdigit() else value for name, value in headers.items()}


@schemathesis.hook
def after_call(context: schemathesis.HookContext, case: schemathesis.Case, response: schemathesis.Response) -> None:
    """Record the request."""
    line = {"operation": case.operation.label, "status": response.status_code}
    with open(LOG, "a") as log:
        log.write(json.dumps(line) + "\n")
