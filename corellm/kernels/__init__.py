"""The seam between the model and the hardware: every operation of a step, behind one protocol.

The reference backend is plain torch: the truth for tests, and the way to run on a CPU. The Triton backend runs on
NVIDIA GPUs. A backend is chosen once, at start.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from corellm.errors import OptionError
from corellm.kernels.inputs import Batch, Heads, Rope

PagedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [n, heads, head_dim], k and v of one layer [blocks, page_size, kv_heads, head_dim]) -> [n, heads * head_dim]."""


class Backend(Protocol):
    """Operations of one device. Sizes: n tokens, s sampling rows, v vocabulary; `x` is in the activations' dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [n, in] times weight [out, in] transposed: [n, out]."""
        ...

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows `tokens` [n] of weight [v, hidden]: [n, hidden]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, the mean in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [n, 2 * width], gate in front: [n, width]."""
        ...

    def rope_write_kv(self, qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate q and k of qkv [n, (heads + 2 kv_heads) * head_dim], write k and v to `kv_slots`, return q.

        k, v: one layer's cache [blocks, page_size, kv_heads, head_dim]. Returns [n, heads, head_dim].
        """
        ...

    def plan_attention(self, batch: Batch, heads: Heads) -> PagedAttention:
        """Do once what all layers of a step share; the result is called once a layer, after `rope_write_kv`."""
        ...

    def non_finite(self, logits: Tensor) -> Tensor:
        """Which rows of logits [s, v] hold NaN or infinity: bool [s]."""
        ...

    def penalize(
        self, logits: Tensor, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, penalties: Tensor
    ) -> Tensor:
        """Logits [s, v] after repetition, presence and frequency penalties: penalties [3, s] in that order.

        tokens: [s, longest] vocabulary ids known so far, of which row i has `lengths[i]`, the prompt in front.
        """
        ...

    def mask_unlikely(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Logits [s, v], scaled by temperature, with -inf for what min-p, top-k, top-p (in this order) exclude.

        top_k int64 [s], 0 is off; top_p and min_p float32 [s]. Ties with the last token kept are kept.
        """
        ...

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """One token for each row of logits [s, v] from softmax(logits): int64 [s].

        The draw depends on nothing but the row's logits, its seed (int64 [s]) and the new token's position (int64 [s]).
        """
        ...


def default_backend(device: torch.device) -> str:
    """The name of the fastest backend on `device`."""
    return "triton" if device.type == "cuda" and find_spec("triton") else "reference"


def load_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend called `name` for activations of `dtype` on `device`.

    Raises `OptionError` for an unknown name, and for one that `device` does not run.
    """
    if name == "reference":
        from corellm.kernels.reference import ReferenceBackend

        return ReferenceBackend(device, dtype)
    if name != "triton":
        raise OptionError(f"kernel backend is {name!r}; it can be 'reference' or 'triton'")
    if device.type != "cuda":
        raise OptionError(f"kernel backend 'triton' needs an NVIDIA GPU, the device is {device}; use 'reference'")
    from corellm.kernels.triton_backend import TritonBackend

    return TritonBackend(device, dtype)
