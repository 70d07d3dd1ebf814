"""A hand-written forward for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3) that uses the
weights of the Hugging Face module.

For small models most of a step is Python code in the Hugging Face module; here a layer is a dozen
kernels. Weights are not copied: the q, k, v (and gate, up) parameters of the module become views of
one fused tensor, so kernels, ``state_dict``, and digests read the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from rollout_workers.engines.transformers.kv import Chunk, KvCache, KvShape, Segment, StepIndex, chunk_index, step_index

_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class LlamaForward:
    """Implements ``Forward``, also for several segments. Create it after the module was moved to
    its device."""

    splits = True
    extends = True

    @staticmethod
    def refusal(module: PreTrainedModel, max_len: int) -> str | None:
        """The reason why this forward can't run the module, or None. ``choose_forward`` finds other
        differences by comparing logits."""
        config = module.config
        if config.model_type not in _ARCHITECTURES:
            return f"the Llama forward does not support {config.model_type}"
        if (getattr(config, "sliding_window", None) or max_len) < max_len:
            return "its attention window is shorter than max_len"
        if any(type(m) is not nn.Linear for m in module.modules() if isinstance(m, nn.Linear)):
            return "it has modified linear layers"
        return None

    def __init__(self, module: PreTrainedModel, max_len: int) -> None:
        config: Any = module.config
        model: Any = module.model
        self.module = module
        self.eps: float = config.rms_norm_eps
        self.embedding: Tensor = model.embed_tokens.weight
        self.norm: Tensor = model.norm.weight
        head: Any = module.lm_head
        self.head: Tensor = head.weight
        self.layers = [_Layer(layer, config) for layer in model.layers]
        first = self.layers[0]
        self.shape = KvShape(len(self.layers), first.kv_heads, first.dim, self.embedding.dtype)
        positions = torch.arange(max_len, device=self.embedding.device)
        cos, sin = model.rotary_emb(self.embedding[:1].detach(), positions.unsqueeze(0))
        half = sin.shape[-1] // 2
        # x * cos + roll(x, dim / 2) * sin with the sign of rotate_half inside sin
        self.cos = cos[0].detach().contiguous()
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).detach().contiguous()

    def rebuilt(self) -> LlamaForward:
        return LlamaForward(self.module, len(self.cos))

    def prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = ids.shape
        x = F.embedding(ids.reshape(-1), self.embedding)
        cos, sin = (t[:width].repeat(rows, 1).unsqueeze(1) for t in (self.cos, self.sin))
        shape = self.shape
        kept = torch.empty((shape.layers, rows, width, 2, shape.heads, shape.dim), dtype=x.dtype, device=x.device)
        for layer, kv in zip(self.layers, kept, strict=True):
            x = layer.prefill(x, cos, sin, kv, self.eps)
        last = torch.arange(0, rows * width, width, device=ids.device) + lengths - 1
        return self._logits(x[last]), kept

    def extend(self, ids: Tensor, starts: Tensor, lengths: Tensor, kv: Tensor) -> Tensor:
        rows, width = ids.shape
        chunk = chunk_index(width, starts, kv, len(self.cos))
        x = F.embedding(ids.reshape(-1), self.embedding)
        cos, sin = (t[chunk.positions.flatten()].unsqueeze(1) for t in (self.cos, self.sin))
        for layer, of_layer in zip(self.layers, kv, strict=True):
            x = layer.extend(x, cos, sin, of_layer, chunk, self.eps)
        last = torch.arange(0, rows * width, width, device=ids.device) + lengths - 1
        return self._logits(x[last])

    def decode(self, tokens: Tensor, positions: Tensor, cache: KvCache, segments: Sequence[Segment]) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        index = step_index(positions, segments, cache)
        for layer, kv in zip(self.layers, cache.data, strict=True):
            x = layer.decode(x, cos, sin, kv, index, self.eps)
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.norm, self.eps), self.head)


class _Layer:
    """One decoder layer on N flattened tokens: x [N, hidden] -> [N, hidden]."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.before_attention = layer.input_layernorm.weight
        self.before_mlp = layer.post_attention_layernorm.weight
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = fuse([p.weight for p in projections])
        self.qkv_bias = None if projections[0].bias is None else fuse([p.bias for p in projections])
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up = fuse([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.gate_up_bias = None if mlp.gate_proj.bias is None else fuse([mlp.gate_proj.bias, mlp.up_proj.bias])
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.activation = F.silu if config.hidden_act in ("silu", "swish") else ACT2FN[config.hidden_act]
        self.head_norms: Tensor | None = None
        if getattr(attention, "q_norm", None) is not None:
            self.head_norms = fuse([attention.q_norm.weight, attention.k_norm.weight]).view(2, -1)
            kinds = [0] * self.heads + [1] * self.kv_heads
            self.norm_of_head = torch.tensor(kinds).to(self.head_norms.device)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, eps: float) -> Tensor:
        """Fill kv [P, T, 2, kv_heads, dim]. Every token attends to itself and the tokens before it
        in its row."""
        rows, width = kv.shape[:2]
        q = self._project(x, cos, sin, kv.view(rows * width, 2, self.kv_heads, self.dim), eps)
        q = q.unflatten(0, (rows, width)).transpose(1, 2)
        k, v = (kv[:, :, i].transpose(1, 2) for i in (0, 1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return self._finish(x, attended.transpose(1, 2).reshape(rows * width, -1), eps)

    def extend(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, chunk: Chunk, eps: float) -> Tensor:
        """Write T positions of each row of kv [P, L, 2, kv_heads, dim], and attend to all up to
        each."""
        rows = kv.shape[0]
        new = torch.empty((x.shape[0], 2, self.kv_heads, self.dim), dtype=x.dtype, device=x.device)
        q = self._project(x, cos, sin, new, eps).unflatten(0, (rows, -1)).transpose(1, 2)
        kv.view(-1, new[0].numel()).index_copy_(0, chunk.flat, new.view(x.shape[0], -1))
        k, v = (kv[:, :, i].transpose(1, 2) for i in (0, 1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask, scale=self.scale, enable_gqa=True)
        return self._finish(x, attended.transpose(1, 2).reshape(x.shape[0], -1), eps)

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, index: StepIndex, eps: float) -> Tensor:
        """Write one position of each row of kv [slots, max_len, 2, kv_heads, dim], then attend, one
        segment at a time.

        The queries of heads that share keys become rows of one attention, so no key is repeated.
        """
        new = torch.empty((x.shape[0], 2, self.kv_heads, self.dim), dtype=x.dtype, device=x.device)
        q = self._project(x, cos, sin, new, eps).unflatten(1, (self.kv_heads, -1))
        kv.view(-1, new[0].numel()).index_copy_(0, index.flat, new.view(x.shape[0], -1))
        parts = []
        for (start, stop, length), mask in index.reads:
            k, v = (kv[start:stop, :length, i].transpose(1, 2) for i in (0, 1))
            parts.append(F.scaled_dot_product_attention(q[start:stop], k, v, attn_mask=mask, scale=self.scale))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._finish(x, attended.reshape(x.shape[0], -1), eps)

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, eps: float) -> Tensor:
        """Queries [N, heads, dim], rotated; keys (rotated) and values go to kv [N, 2, kv_heads,
        dim]."""
        h = F.rms_norm(x, (x.shape[-1],), self.before_attention, eps)
        qkv = F.linear(h, self.qkv, self.qkv_bias).view(x.shape[0], -1, self.dim)
        qk = qkv[:, : self.heads + self.kv_heads]
        kv[:, 1] = qkv[:, self.heads + self.kv_heads :]
        if self.head_norms is not None:
            qk = F.rms_norm(qk, (self.dim,), None, eps).mul_(self.head_norms[self.norm_of_head])
        qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)  # rotary position embedding (Su et al. 2021)
        kv[:, 0] = qk[:, self.heads :]
        return qk[:, : self.heads]

    def _finish(self, x: Tensor, attended: Tensor, eps: float) -> Tensor:
        x = x + F.linear(attended, self.out, self.out_bias)
        h = F.rms_norm(x, (x.shape[-1],), self.before_mlp, eps)
        gate, up = F.linear(h, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(self.activation(gate).mul_(up), self.down, self.down_bias)


@torch.no_grad()
def fuse(parameters: list[nn.Parameter]) -> Tensor:
    """Concatenate the parameters' rows in one tensor, of which the parameters become views."""
    fused = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return fused
