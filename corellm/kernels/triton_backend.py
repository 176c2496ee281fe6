"""The Triton backend: attention, what lies between matrix products, and sampling; the rest is the reference's."""

from __future__ import annotations

import torch

# What compiling imports by itself, in cycles that deadlock where several threads begin to compile at the same time.
import triton.compiler.code_generator
import triton.language.extra.libdevice  # noqa: F401
from torch import Tensor

from corellm.kernels import (
    AttentionPlan,
    hopper_prefill,
    triton_logits,
    triton_pointwise,
    triton_sampling,
    triton_truncation,
)
from corellm.kernels.hopper_prefill import HopperPrefill
from corellm.kernels.inputs import Heads, Rope, Rows
from corellm.kernels.reference import ReferenceBackend
from corellm.kernels.skinny_products import SkinnyProducts
from corellm.kernels.triton_plan import AttentionSetup
from corellm.kernels.tuning import AttentionTuning, attention_tuning

HEAD_DIMS = (16, 32, 64, 128)  # a tile's side is a power of 2, and a matrix instruction takes 16


class TritonBackend(ReferenceBackend):
    """Implements `corellm.kernels.Backend`; what has no kernel here, the reference does.

    tuning, sms (multiprocessors): read off the device unless given. hopper: take Hopper's own kernels where they fit.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tuning: AttentionTuning | None = None, sms: int | None = None,
        hopper: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device, dtype)
        self._skinny = SkinnyProducts(device, dtype)
        self.linear = self._skinny.linear
        self._pdl = self._skinny.pdl
        self._dtype, self._hopper = dtype, hopper
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._tuning = tuning or attention_tuning(self._capability, dtype)
        self._sms = sms or torch.cuda.get_device_properties(device).multi_processor_count
        self._setups: dict[tuple[Heads, int], AttentionSetup] = {}

    locate = staticmethod(triton_pointwise.locate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_pointwise.rms_norm(x, weight, eps, pdl=self._pdl)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_pointwise.silu_mul(gate_up, pdl=self._pdl)

    def rope_write_kv(self, qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if heads.dim not in HEAD_DIMS:
            return super().rope_write_kv(qkv, rope, heads, kv_slots, k, v)
        return triton_pointwise.rope_write_kv(qkv, rope, heads, kv_slots, k, v, pdl=self._pdl)

    def linear_to(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._skinny.linear_to(x, weight, out)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> None:
        if self._skinny.covers(len(x), *weight.shape):
            self._skinny.linear_add(x, weight, residual)
        else:
            residual.addmm_(x, weight.t())  # the sum is rounded once, and takes no pass of its own

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        if self._skinny.fuses(len(x), *weight.shape):
            return self._skinny.norm_linear(x, norm_weight, eps, weight)
        return super().norm_linear(x, norm_weight, eps, weight)

    def norm_gated(self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        if self._skinny.fuses(len(x), *gate_up.shape):
            return self._skinny.norm_gated(x, norm_weight, eps, gate_up)
        return super().norm_gated(x, norm_weight, eps, gate_up)

    def norm_qkv(
        self, x: Tensor, norm_weight: Tensor, eps: float, qkv: Tensor,
        rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        if heads.dim in HEAD_DIMS and self._skinny.fuses(len(x), *qkv.shape):
            return self._skinny.norm_qkv(x, norm_weight, eps, qkv, rope, heads, kv_slots, k, v)
        return super().norm_qkv(x, norm_weight, eps, qkv, rope, heads, kv_slots, k, v)

    def can_capture(self, heads: Heads) -> bool:
        return heads.dim in HEAD_DIMS

    def plan_attention(self, rows: Rows, heads: Heads, page_size: int, width: int | None = None) -> AttentionPlan:
        if heads.dim not in HEAD_DIMS:
            return super().plan_attention(rows, heads, page_size, width)
        if (heads, page_size) not in self._setups:
            self._setups[heads, page_size] = self._setup(heads, page_size)
        return self._setups[heads, page_size].plan(rows, width)

    def _setup(self, heads: Heads, page_size: int) -> AttentionSetup:
        fits = self._hopper and hopper_prefill.supports(heads, self._dtype, page_size, self._capability)
        prefill = HopperPrefill(heads, page_size, self._sms) if fits else None
        return AttentionSetup(heads, page_size, self._sms, self._tuning, self._pdl, prefill)

    sample = staticmethod(triton_sampling.sample)
    penalize = staticmethod(triton_logits.penalize)
    mask_unlikely = staticmethod(triton_truncation.mask_unlikely)
    apply_bitmask = staticmethod(triton_logits.apply_bitmask)
