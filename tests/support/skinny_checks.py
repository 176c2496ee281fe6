"""Products of few rows against float64, rounded where the reference rounds, on random inputs and poisoned outputs.

With every rounding in its place a result differs from the truth in the rare element that float32 sums round to the
other side; one rounding more or less changes a tenth of all elements.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from corellm.kernels.inputs import Heads, Rope
from corellm.kernels.skinny_products import SkinnyProducts

EPS = 1e-5
WORST = {
    torch.float32: 2e-6,
    torch.float16: 1e-4,
    torch.bfloat16: 8e-4,
}  # of the norm of the difference to the norm of the truth


class SkinnyCase:
    """Random x [m, k] and weight [n, k]; each check runs one function of `products` and compares."""

    def __init__(self, products: SkinnyProducts, m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(m + n + k)
        self.products, self.dtype, self.device = products, dtype, device
        self.m, self.n = m, n
        self.x, self.norm = self.random(m, k), self.random(k)
        self.weight = (self.random(n, k) * k**-0.5).to(dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(self.dtype)

    def check_linear(self) -> None:
        self._close(self.products.linear(self.x, self.weight), self._product(self.x))

    def check_linear_add(self) -> None:
        residual = self.random(self.m, self.n)
        expected = self._rounded(residual.double() + self._product(self.x))
        self.products.linear_add(self.x, self.weight, residual)
        self._close(residual, expected)

    def check_norm_linear(self) -> None:
        out = self.products.norm_linear(self.x, self.norm, EPS, self.weight)
        self._close(out, self._product(self._normed()))

    def check_norm_gated(self) -> None:
        gate, up = self._product(self._normed()).chunk(2, dim=-1)
        out = self.products.norm_gated(self.x, self.norm, EPS, self.weight)
        self._close(out, self._rounded(gate / (1 + (-gate).exp()) * up))

    def check_norm_qkv(self, heads: Heads, page_size: int = 4) -> None:
        """K and V land in their slots and nowhere else."""
        blocks = self.m // page_size + 2
        slots = torch.randperm(blocks * page_size, generator=self.generator, device=self.device)[: self.m]
        cache = torch.full((2, blocks, page_size, heads.kv, heads.dim), torch.nan, dtype=self.dtype, device=self.device)
        angles = self.random(self.m, 1, heads.dim // 2).float()
        cos, sin = angles.cos(), angles.sin()
        rope = Rope(torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype))
        q = self.products.norm_qkv(self.x, self.norm, EPS, self.weight, rope, heads, slots, cache[0], cache[1])

        qkv = self._product(self._normed()).view(self.m, -1, heads.dim)
        q_and_k = qkv[:, : heads.count + heads.kv]
        partner = q_and_k.roll(heads.dim // 2, -1)
        turned = self._rounded(q_and_k * rope.cos.double() + partner * rope.sin.double())
        keys, values = cache.view(2, -1, heads.kv, heads.dim)
        self._close(q, turned[:, : heads.count])
        self._close(keys[slots], turned[:, heads.count :])
        self._close(values[slots], qkv[:, heads.count + heads.kv :])
        others = torch.ones(len(keys), dtype=torch.bool, device=self.device)
        others[slots] = False
        assert keys[others].isnan().all()
        assert values[others].isnan().all()

    def _normed(self) -> Tensor:
        wide = self.x.double()
        scaled = self._rounded(wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt())
        return self._rounded(scaled * self.norm.double())

    def _product(self, x: Tensor) -> Tensor:
        return self._rounded(x.double() @ self.weight.double().T)

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def _close(self, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == self.dtype
        assert actual.shape == expected.shape
        error = float((actual.double() - expected).norm() / expected.norm())
        assert error < WORST[self.dtype], f"error {error:.1e} of {self.m} rows, weight {list(self.weight.shape)}"


def poison_outputs(patch: pytest.MonkeyPatch) -> None:
    """Let what `new_empty` allocates for the launches of kernels hold NaN until it is written."""
    new_empty = Tensor.new_empty

    def new_nan(tensor: Tensor, *size: Any, **options: Any) -> Tensor:
        fresh = new_empty(tensor, *size, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    patch.setattr(Tensor, "new_empty", new_nan)
