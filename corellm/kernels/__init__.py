"""The seam between the model and the hardware: every operation of a step, behind one protocol.

The reference backend is plain torch: the truth for tests, and the way to run on a CPU. The Triton backend runs on
NVIDIA GPUs. A backend is chosen once, at start.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.errors import OptionError
from corellm.kernels.inputs import Heads, Rope, Rows

PagedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [n, heads, head_dim], k and v of one layer [blocks, page_size, kv_heads, head_dim]) -> [n, heads * head_dim]."""


class AttentionPlan(Protocol):
    """What all layers of a step share of attention, decided on the host."""

    @property
    def words(self) -> NDArray[np.int32]:
        """What the device must be told; it may be empty."""
        ...

    def bind(self, words: Tensor, block_table: Tensor) -> PagedAttention:
        """The plan on the device: `words` are there now; block_table int32 [slots, blocks] serves every step.

        The result is called once a layer, after `rope_write_kv`.
        """
        ...


class Backend(Protocol):
    """Operations of one device. Sizes: n tokens, s sampling rows, v vocabulary; `x` is in the activations' dtype.

    `penalize`, `mask_unlikely` and `apply_bitmask` may overwrite the logits they are given.
    """

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [n, in] times weight [out, in] transposed: [n, out]."""
        ...

    def locate(
        self, slots: Tensor, positions: Tensor, tokens: Tensor, block_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the tables hold of the step's tokens, named by slot and position (int32 [n] each).

        tokens, block_table: int32 [slots, ...]. Returns the ids int32 [n], the positions int64 [n], and the KV slots
        `block * page_size + offset` int64 [n].
        """
        ...

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows `tokens` [n] of weight [v, hidden]: [n, hidden]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, the mean in float32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [n, 2 * width], gate in front: [n, width]."""
        ...

    def rope_write_kv(self, qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate q and k of qkv [n, (heads + 2 kv_heads) * head_dim], write k and v to `kv_slots`, return q.

        k, v: one layer's cache [blocks, page_size, kv_heads, head_dim]. Returns [n, heads, head_dim].
        """
        ...

    def can_capture(self, heads: Heads) -> bool:
        """Whether a step can be captured in a CUDA graph: nothing in it depends on the host but `words`."""
        ...

    def linear_to(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write `linear(x, weight)` to out [n, out]."""
        ...

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> None:
        """Add `linear(x, weight)` to residual [n, out] in place."""
        ...

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`linear` of `rms_norm`."""
        ...

    def norm_gated(self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """`silu_mul` of `norm_linear`, gate_up [2 * width, in]: [n, width]."""
        ...

    def norm_qkv(
        self, x: Tensor, norm_weight: Tensor, eps: float, qkv: Tensor,
        rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        """`rope_write_kv` of `norm_linear`."""
        ...

    def plan_attention(self, rows: Rows, heads: Heads, page_size: int, width: int | None = None) -> AttentionPlan:
        """Plan a step's attention. With `width`, `words` has one size for any rows, up to `width` of one token each:
        a graph that was captured with one such plan may run with the words of another."""
        ...

    def sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One token for each row of logits [s, v], of any float dtype: (tokens int64 [s], failed bool [s]).

        Where `temperatures` (float32 [s]) is under `COLDEST` the likeliest, the lowest id on ties; elsewhere a draw
        from softmax(logits / temperature) that depends on nothing but the row's logits, its seed (int64 [s]) and the
        new token's position (int64 [s]). failed: the row holds NaN or infinity. Its token is 0, unless it holds no
        infinity but -inf: then it is drawn as ever, and never one at -inf.
        """
        ...

    def penalize(
        self, logits: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor, penalties: Tensor
    ) -> Tensor:
        """Logits float32 [s, v] after repetition, presence and frequency penalties: penalties [3, s] in that order.

        Row i has seen the first `lengths[i]` vocabulary ids of row `slots[i]` of `table` (int32), its prompt in front.
        """
        ...

    def mask_unlikely(self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Logits [s, v], scaled by temperature, with -inf for what min-p, top-k, top-p (in this order) exclude.

        top_k int64 [s], 0 is off; top_p and min_p float32 [s]. Ties with the last token kept are kept.
        """
        ...

    def apply_bitmask(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Logits [s, v] with -inf for each id whose bit, id % 32 of word id // 32 of mask int32 [s, ⌈v / 32⌉], is 0."""
        ...

    def top_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Natural-log probabilities under logits [s, v]: of `tokens` (int64 [s]), and the k likeliest ids and theirs.

        Returns float32 [s], int64 [s, k], float32 [s, k], likeliest first.
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
