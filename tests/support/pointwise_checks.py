"""A backend's norms, rotation and activation against formulas in float64, on inputs rounded to the backend's dtype."""

from __future__ import annotations

import numpy as np
import torch

from corellm.kernels import Backend
from corellm.kernels.inputs import Heads
from corellm.layers.rotary import RotaryTable, inverse_frequencies

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # about two roundings


def check_norms(backend: Backend, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for shape in ((rows, width), (width,))
    )
    untouched = x.clone()
    _close(backend.rms_norm(x, weight, 1e-5), _norm(x, weight))
    assert torch.equal(x, untouched)
    tiny = torch.full((1, width), 1e-3, dtype=dtype, device=device)  # small enough for eps to matter
    _close(backend.rms_norm(tiny, weight, 1e-5), _norm(tiny, weight))


def check_silu_mul(backend: Backend, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    generator = torch.Generator(device).manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width, generator=generator, device=device)).to(dtype)
    gate_up[0, :2] = torch.tensor([-100.0, 100.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    _close(backend.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


def check_rope(
    backend: Backend, tokens: int, heads: Heads, page_size: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Pairs as complex numbers turned by exp(i * angle); K and V land in their slots and nowhere else."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = tokens // page_size + 2
    positions = torch.randint(512, (tokens,), generator=generator, device=device)
    slots = torch.randperm(blocks * page_size, generator=generator, device=device)[:tokens]
    every = heads.count + 2 * heads.kv
    qkv = torch.randn(tokens, every * heads.dim, generator=generator, device=device).to(dtype)
    k, v = torch.full((2, blocks, page_size, heads.kv, heads.dim), torch.nan, dtype=dtype, device=device)
    table = RotaryTable(inverse_frequencies(heads.dim, 10000.0, None), 512, torch.device(device), dtype)
    rope = table.lookup(positions)
    q = backend.rope_write_kv(qkv.clone(), rope, heads, slots, k, v)

    wide = qkv.view(tokens, every, heads.dim).double()
    half = heads.dim // 2
    factor = torch.complex(rope.cos[..., :half].double(), rope.sin[..., half:].double())
    turned = torch.complex(wide[..., :half], wide[..., half:]) * factor
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    _close(q, turned[:, : heads.count])
    keys, values = (cache.view(-1, heads.kv, heads.dim) for cache in (k, v))
    _close(keys[slots], turned[:, heads.count : heads.count + heads.kv])
    assert torch.equal(values[slots].double(), wide[:, heads.count + heads.kv :])
    others = torch.ones(blocks * page_size, dtype=torch.bool, device=device)
    others[slots] = False
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def check_locate(backend: Backend, count: int, page_size: int, device: str = "cpu") -> None:
    """Against a loop over tables that are views of one memory, as a worker's are."""
    rng = np.random.default_rng(count)
    memory = torch.from_numpy(rng.integers(0, 1000, (7, 100), dtype=np.int32)).to(device)
    tokens, blocks = memory[:, :60], memory[:, 64:94]
    slots, positions = (rng.integers(0, top, count, dtype=np.int32) for top in (7, min(60, 30 * page_size)))
    found, places, kv_slots = backend.locate(
        torch.from_numpy(slots).to(device), torch.from_numpy(positions).to(device), tokens, blocks, page_size
    )
    pairs = list(zip(slots.tolist(), positions.tolist(), strict=True))
    assert found.tolist() == [tokens[slot, position].item() for slot, position in pairs]
    assert places.tolist() == positions.tolist()
    assert kv_slots.tolist() == [
        blocks[slot, position // page_size].item() * page_size + position % page_size for slot, position in pairs
    ]
    assert (found.dtype, places.dtype, kv_slots.dtype) == (torch.int32, torch.int64, torch.int64)
