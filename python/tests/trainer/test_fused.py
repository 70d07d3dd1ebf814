"""Fused layers against the models' own: values, gradients, and which layers are replaced."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as turned_partly
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rollout_workers.kernels import loading
from rollout_workers.kernels.build import library
from rollout_workers.kernels.layers import LayerKernels, layer_kernels
from rollout_workers.trainer.model import fused

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


@pytest.fixture(scope="module")
def kernels(libraries: Path) -> LayerKernels:
    """The compiled kernels of this checkout."""
    return LayerKernels(library("layers", libraries))


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def same(found: Tensor, wanted: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Compares both values, and the gradients that both give to the leaves."""
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    weights = drawn(*wanted.shape, seed=9).detach()
    gradients = (torch.autograd.grad(value, leaves, weights, retain_graph=True) for value in (found, wanted))
    for mine, own in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, own, atol=2e-6 * float(own.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (2, 130, 24), (300, 129), (2, 5, 3, 32)])
def test_norms(kernels: LayerKernels, shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(shape[-1], seed=1)
    own = Qwen3RMSNorm(shape[-1], eps=1e-6)
    own.weight = nn.Parameter(weight.detach())
    leaves = (x, own.weight)
    same(fused.FusedRmsNorm.apply(x, own.weight, 1e-6, kernels), own(x), leaves)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [1, 5, 4096, 4099, 70_001])
def test_gates(kernels: LayerKernels, size: int) -> None:
    gate, up = drawn(size, scale=8), drawn(size, seed=1)
    with torch.no_grad():
        gate[: size // 3] *= 40  # as far as 1 / (1 + exp) goes
    same(fused.FusedSwiGlu.apply(gate, up, kernels), nn.functional.silu(gate) * up, (gate, up))  # pyright: ignore[reportArgumentType]


def test_nan_is_kept(kernels: LayerKernels) -> None:
    """NaN makes the trainer refuse the step."""
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [1.0, 1.0]])
    ones = torch.ones_like(x)
    assert kernels.swiglu(x, ones).isnan().tolist() == [[True, False], [False, False], [False, False]]
    assert kernels.swiglu(x, ones)[1, 0] == torch.inf
    assert kernels.swiglu_backward(ones, x, ones)[0][0, 0].isnan()
    assert kernels.rms_norm(x, ones[0], 1e-6)[0][0].isnan().all()
    assert not kernels.rms_norm(x, ones[0], 1e-6)[0][2].isnan().any()


@pytest.mark.parametrize(("rows", "width", "heads", "size"), [(1, 1, 1, 2), (2, 5, 3, 8), (3, 130, 4, 32), (2, 9, 5, 34)])
@pytest.mark.parametrize("shared", [False, True])
def test_rotations(kernels: LayerKernels, rows: int, width: int, heads: int, size: int, shared: bool) -> None:
    q, k = drawn(rows, width, heads, size), drawn(rows, width, 1, size, seed=1)
    angles = drawn(1 if shared else rows, width, size, seed=2, scale=3).detach()
    cos, sin = angles.cos(), (angles * 1.5).sin()
    rotation = fused.Rotation(None, kernels)  # the wrapped module is never called
    found, wanted = (f(q.transpose(1, 2), k.transpose(1, 2), cos, sin) for f in (rotation, apply_rotary_pos_emb))
    for mine, own, leaf in zip(found, wanted, (q, k), strict=True):
        same(mine, own, (leaf,))


def test_a_rotation_of_a_part_of_a_head_is_the_models_own(kernels: LayerKernels) -> None:
    q, k, angles = drawn(2, 3, 4, 16), drawn(2, 3, 4, 16, seed=1), drawn(2, 4, 8, seed=2).detach()
    rotation = fused.Rotation(turned_partly, kernels)
    for mine, own in zip(
        rotation(q, k, angles.cos(), angles.sin()), turned_partly(q, k, angles.cos(), angles.sin()), strict=True
    ):
        assert torch.equal(mine, own)


def test_bits_do_not_depend_on_threads(kernels: LayerKernels) -> None:
    x, weight = drawn(700, 96).detach(), drawn(96, seed=1).detach()
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y, scale = kernels.rms_norm(x, weight, 1e-6)
            turned = kernels.rotary(x.view(1, 700, 3, 32), *(of[None, :, :32].contiguous() for of in (x, y)))
            found.append(
                (
                    y,
                    *kernels.rms_norm_backward(y, x, weight, scale),
                    kernels.swiglu(x, y),
                    *kernels.swiglu_backward(y, x, y),
                    turned,
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


def model(kind: type[LlamaForCausalLM] = LlamaForCausalLM, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return kind(LlamaConfig(**{**CONFIG.to_dict(), **settings})).eval()


def changed(of: nn.Module) -> set[str]:
    return {type(module).__name__ for module in of.modules() if "forward" in vars(module)}


def test_a_whole_model_gives_the_same_results() -> None:
    own, ours = model(), model()
    fused.install(ours)
    assert changed(ours) == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    token_ids = torch.arange(40).view(2, 20) % 32
    gradients = []
    for each in (own, ours):
        logits = each(input_ids=token_ids, use_cache=False).logits
        gradients.append(torch.autograd.grad(logits.log_softmax(-1)[..., 0].sum(), list(each.parameters())))
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


class HalvedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class ClampedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x).clamp(-7, 7))


def empty(layers: LlamaForCausalLM) -> LlamaForCausalLM:
    """Layers that return zeros for any input."""
    for each in layers.modules():
        if isinstance(each, LlamaMLP):
            nn.init.zeros_(each.down_proj.weight)
    return layers


def test_layers_with_other_formulas_are_not_replaced(kernels: LayerKernels) -> None:
    others = (
        model(hidden_act="gelu"),
        empty(model(hidden_act="gelu")),
        HalvedMLP(CONFIG),
        ClampedMLP(CONFIG),
        model().bfloat16(),
    )
    for other in others:
        fused.install_swiglu(other, kernels)
        assert not changed(other)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    ours = model()
    fused.install(ours)
    copied, token_ids = copy.deepcopy(ours), torch.arange(12).view(1, 12)
    before = ours(input_ids=token_ids).logits
    assert torch.equal(copied(input_ids=token_ids).logits, before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert torch.equal(ours(input_ids=token_ids).logits, before)
    assert not torch.equal(copied(input_ids=token_ids).logits, before)


def test_other_dtypes_give_the_same_results(kernels: LayerKernels) -> None:
    """A model that was replaced in float32 and then cast: each layer checks the dtype of its
    input."""
    own, ours = model(), model()
    fused.install(ours)
    token_ids = torch.arange(12).view(1, 12)
    own, ours = own.double(), ours.double()
    torch.testing.assert_close(ours(input_ids=token_ids).logits, own(input_ids=token_ids).logits, atol=1e-6, rtol=1e-5)


def test_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer_kernels.cache_clear()
    monkeypatch.setattr(loading, "library", lambda _: tmp_path / "none.so")
    try:
        with caplog.at_level(logging.WARNING):
            ours = model()
            fused.install(ours)
    finally:
        layer_kernels.cache_clear()
    assert changed(ours) == {"LlamaRMSNorm"}
    assert "scripts/kernel" in caplog.text


class CentredRMSNorm(Qwen3RMSNorm):
    """Multiplies by one more than its weight, as Gemma's does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + hidden_states * 0.5


def norm_of(kind: type[Qwen3RMSNorm], width: int = 24) -> Qwen3RMSNorm:
    norm = kind(width, eps=1e-6)
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    return norm


def test_value_and_gradient_are_those_of_the_models_own() -> None:
    own, ours = norm_of(Qwen3RMSNorm), norm_of(Qwen3RMSNorm)
    fused.install_rms_norm(nn.Sequential(ours), None)
    assert isinstance(ours.forward, fused.NormForward)
    for shape in ((7, 24), (2, 3, 5, 24)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x[0] *= 1e4
        x[1] = 0
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, wanted = ours(one), own(other)
        torch.testing.assert_close(found, wanted)
        for a, b in zip(
            torch.autograd.grad(found, (one, ours.weight), weights),
            torch.autograd.grad(wanted, (other, own.weight), weights),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_norm_with_another_formula_is_not_replaced() -> None:
    norm = norm_of(CentredRMSNorm)
    fused.install_rms_norm(nn.Sequential(norm), None)
    assert "forward" not in vars(norm)


def test_other_dtypes_are_not_replaced() -> None:
    norm = norm_of(Qwen3RMSNorm).to(torch.bfloat16)
    fused.install_rms_norm(nn.Sequential(norm), None)
    assert "forward" not in vars(norm)
