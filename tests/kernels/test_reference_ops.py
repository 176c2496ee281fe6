"""The reference backend's dense operations against transformers' modules and float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from corellm.errors import OptionError
from corellm.kernels import load_backend
from corellm.kernels.inputs import Heads
from corellm.layers.rotary import RotaryTable, inverse_frequencies
from tests.support.executor_models import CPU, LLAMA3_ROPE, spec_of, tiny_llama

F32 = torch.float32
BACKEND = load_backend("reference", CPU, F32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(OptionError, match="'gpu'; it can be 'reference'"):
        load_backend("gpu", CPU, F32)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
    expected = x.double() @ weight.double().T
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(
        load_backend("reference", CPU, dtype).linear(x, weight).double(), expected, rtol=0.01, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_transformers(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 2)
    x = torch.randn(5, 64, dtype=dtype)
    backend = load_backend("reference", CPU, dtype)
    tolerance = {"rtol": 1e-6, "atol": 1e-6}  # the same roundings in bfloat16 too
    torch.testing.assert_close(backend.rms_norm(x, norm.weight, 1e-5), norm(x), **tolerance)


def test_rms_norm_of_tiny_values_uses_eps() -> None:
    x = torch.full((1, 8), 1e-4)
    expected = 1e-4 / (1e-8 + 1e-5) ** 0.5
    torch.testing.assert_close(BACKEND.rms_norm(x, torch.ones(8), 1e-5), torch.full((1, 8), expected))


def test_silu_mul_takes_the_gate_in_front() -> None:
    gate, up = torch.randn(3, 10, dtype=torch.float64), torch.randn(3, 10, dtype=torch.float64)
    expected = gate / (1 + (-gate).exp()) * up
    actual = BACKEND.silu_mul(torch.cat((gate, up), dim=1).float())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, {"rope_type": "default", "rope_theta": 10000.0}])
def test_rotary_factors_are_transformers(rope: dict[str, object]) -> None:
    model = tiny_llama(head_dim=32, rope_parameters=rope)
    spec = spec_of(model)
    theirs = LlamaRotaryEmbedding(model.config)
    frequencies = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    assert torch.equal(frequencies, theirs.inv_freq)
    positions = torch.tensor([0, 1, 5, 63, 64, 300, 511])
    ours = RotaryTable(frequencies, 512, CPU, F32).lookup(positions)
    cos, sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0].abs(), sin[0].abs(), rtol=0, atol=1e-6)


def test_rope_rotates_q_and_k_as_transformers_and_writes_kv_where_told() -> None:
    heads, n = Heads(4, 2, 16), 5
    positions, slots = torch.tensor([3, 0, 17, 8, 9]), torch.tensor([11, 0, 7, 4, 3])
    model = tiny_llama(head_dim=16)
    cos, sin = LlamaRotaryEmbedding(model.config)(torch.zeros(1), positions[None])
    qkv = torch.randn(n, 8 * 16)
    q, key, value = qkv.view(1, n, 8, 16).transpose(1, 2).split([4, 2, 2], dim=1)
    expected_q, expected_k = apply_rotary_pos_emb(q, key, cos, sin)

    k, v = torch.full((2, 3, 4, 2, 16), torch.nan)
    spec = spec_of(model)
    table = RotaryTable(inverse_frequencies(16, spec.rope_theta, spec.rope_scaling), 32, CPU, F32)
    rotated = BACKEND.rope_write_kv(qkv.clone(), table.lookup(positions), heads, slots, k, v)

    torch.testing.assert_close(rotated, expected_q[0].transpose(0, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(k.view(12, 2, 16)[slots], expected_k[0].transpose(0, 1), rtol=0, atol=1e-5)
    assert torch.equal(v.view(12, 2, 16)[slots], value[0].transpose(0, 1))
    untouched = np.setdiff1d(np.arange(12), slots.numpy())
    assert k.view(12, -1)[untouched].isnan().all()
    assert v.view(12, -1)[untouched].isnan().all()
