"""A completions server in OpenAI's format with a real model, and the faults of such servers, for
tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

Json = dict[str, Any]


class Served:
    """Serves until ``close``. ``spoil``: changes an answer, or is the status and body of the
    answer."""

    def __init__(self, model: Any, tokenizer: Any, key: str = "") -> None:
        self.model, self.tokenizer, self.key = model, tokenizer, key
        self.spoil: Callable[[Json], Json | bytes | int] = lambda answer: answer
        self.asked: list[Json] = []
        self.headers: dict[str, str] = {}
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer: Json | bytes | int = 401
                if not outer.key or self.headers["Authorization"] == f"Bearer {outer.key}":
                    with outer._lock:
                        outer.asked.append(body)
                        answer = outer.spoil(outer.answer(body))
                status = answer if isinstance(answer, int) else 200
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @torch.no_grad()
    def answer(self, body: Json) -> Json:
        """Answers in both protocols like vLLM."""
        ids: list[int] = body["prompt"]
        logprobs = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        values = [None, *(float(logprobs[place - 1, ids[place]]) for place in range(1, len(ids)))]
        best = int(logprobs[-1].argmax())
        if "prompt_logprobs" in body:
            entries = [None if v is None else {str(i): {"logprob": v, "rank": 1}} for v, i in zip(values, ids, strict=True)]
            return {"choices": [{"text": "", "prompt_logprobs": entries}]}
        texts = self.tokenizer.convert_ids_to_tokens([*ids, best])
        return {"choices": [{"logprobs": {"tokens": texts, "token_logprobs": [*values, float(logprobs[-1, best])]}}]}
