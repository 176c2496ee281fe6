"""Matrix products of few rows: which kernel takes a product, and its launch.

Nothing here synchronises or depends on values, so that everything can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from corellm.kernels.gemm_tuning import (
    NO_TILES,
    WIDTHS,
    GemmTile,
    HeldTile,
    PipedTile,
    Shapes,
    Tile,
    Tiles,
    tiles_for,
)
from corellm.kernels.inputs import Heads, Rope
from corellm.kernels.triton_gemm import gemm_kernel
from corellm.kernels.triton_gemv import (
    held_gated_kernel,
    held_linear_kernel,
    held_qkv_kernel,
    piped_linear_kernel,
)

_PDL_FROM = (9, 0)  # compute capability
_LEAST_MMA_ROWS = 8  # of x that a matrix instruction takes


def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PDL_FROM


class SkinnyProducts:
    """Products of x [m, k] with a weight [n, k], of one dtype on one device; both are contiguous.

    shapes: tiles by (n, k), instead of those that are tuned for the device's bfloat16 and absent for other dtypes.
    pdl: programmatic dependent launch, where the device has it. A kernel may then start, and read its weight, while
    earlier ones still run: weights are written by no kernel of a step.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, shapes: Shapes | None = None, *, pdl: bool = True
    ) -> None:
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.pdl = pdl and has_pdl(device)
        self._shapes = shapes
        self._tuned = dtype == torch.bfloat16
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._tiles: dict[tuple[int, int, int], Tile | None] = {}

    def covers(self, m: int, n: int, k: int) -> bool:
        """Whether a kernel here is faster than cuBLAS for m rows and a weight [n, k]."""
        return self._tile(m, n, k) is not None

    def fuses(self, m: int, n: int, k: int) -> bool:
        """Whether `norm_linear`, `norm_gated` and `norm_qkv` take m rows and a weight [n, k]."""
        return isinstance(self._tile(m, n, k), HeldTile)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """F.linear(x, weight)."""
        out = x.new_empty(len(x), len(weight))
        self.linear_to(x, weight, out)
        return out

    def linear_to(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out.copy_(F.linear(x, weight)), without the copy."""
        tile = self._tile(len(x), *weight.shape)
        if tile is None:
            torch.mm(x, weight.t(), out=out)
        else:
            self._launch_linear(tile, x, weight, out, add=False)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> None:
        """residual.add_(F.linear(x, weight))."""
        tile = self._tile(len(x), *weight.shape)
        if tile is None:
            residual.add_(F.linear(x, weight))
        else:
            self._launch_linear(tile, x, weight, residual, add=True)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        """F.linear(rms_norm(x, norm_weight, eps), weight), where `fuses` says so."""
        out = x.new_empty(len(x), len(weight))
        self._launch_held(self._held(x, weight), x, norm_weight, weight, out, eps, add=False)
        return out

    def norm_gated(self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of F.linear(rms_norm(x, norm_weight, eps), gate_up): [m, n // 2], where `fuses` says so."""
        tile, width = self._held(x, gate_up), len(gate_up) // 2
        out = x.new_empty(len(x), width)
        held_gated_kernel[(triton.cdiv(2 * width, tile.rows * tile.steps),)](
            x, norm_weight, gate_up, out, len(x), width, eps, **self._held_sizes(tile, x)
        )
        return out

    def norm_qkv(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        qkv: Tensor,
        rope: Rope,
        heads: Heads,
        kv_slots: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """`Backend.rope_write_kv` of F.linear(rms_norm(x, norm_weight, eps), qkv), where `fuses` says so."""
        tile = self._held(x, qkv)
        q = x.new_empty(len(x), heads.count, heads.dim)
        held_qkv_kernel[(triton.cdiv(len(qkv), tile.rows * tile.steps),)](
            x, norm_weight, qkv, rope.cos, rope.sin, kv_slots, q, k, v, len(x), eps,
            HEADS=heads.count, KV_HEADS=heads.kv, DIM=heads.dim, **self._held_sizes(tile, x),
        )  # fmt: skip
        return q

    def _tile(self, m: int, n: int, k: int) -> Tile | None:
        if not 0 < m <= WIDTHS[-1]:
            return None
        key = (m, n, k)
        if key not in self._tiles:
            self._tiles[key] = self._tiles_of(n, k)[WIDTHS.index(_width(m))]
        return self._tiles[key]

    def _tiles_of(self, n: int, k: int) -> Tiles:
        if self._shapes is not None:
            return self._shapes.get((n, k), NO_TILES)
        return tiles_for(self._capability, n, k) if self._tuned else NO_TILES

    def _held(self, x: Tensor, weight: Tensor) -> HeldTile:
        tile = self._tile(len(x), *weight.shape)
        if not isinstance(tile, HeldTile):
            raise ValueError(f"no fused kernel for {len(x)} rows and a weight {list(weight.shape)}; ask `fuses` first")
        return tile

    def _launch_linear(self, tile: Tile, x: Tensor, weight: Tensor, out: Tensor, *, add: bool) -> None:
        m, (n, k) = len(x), weight.shape
        width = _width(m)
        match tile:
            case HeldTile():
                self._launch_held(tile, x, None, weight, out, 0.0, add=add)
            case PipedTile():
                piped_linear_kernel[(triton.cdiv(n, tile.rows),)](
                    x, weight, out, m, n, K=k, BLOCK_M=width, ROWS=tile.rows, BLOCK_K=tile.block_k,
                    STAGES=tile.stages, ADD=add, num_warps=tile.warps, **self._dependent(),
                )  # fmt: skip
            case GemmTile():
                gemm_kernel[(triton.cdiv(n, tile.block_n),)](
                    x, weight, out, m, n, K=k, BLOCK_M=max(width, _LEAST_MMA_ROWS), BLOCK_N=tile.block_n,
                    BLOCK_K=tile.block_k, ADD=add, PRECISION=self._precision,
                    num_warps=tile.warps, num_stages=tile.stages, **self._dependent(),
                )  # fmt: skip

    def _launch_held(
        self,
        tile: HeldTile,
        x: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        out: Tensor,
        eps: float,
        *,
        add: bool,
    ) -> None:
        held_linear_kernel[(triton.cdiv(len(weight), tile.rows * tile.steps),)](
            x, norm_weight, weight, out, len(x), len(weight), eps,
            NORM=norm_weight is not None, ADD=add, **self._held_sizes(tile, x),
        )  # fmt: skip

    def _held_sizes(self, tile: HeldTile, x: Tensor) -> dict[str, int | bool | None]:
        return {
            "K": x.shape[1],
            "BLOCK_M": _width(len(x)),
            "ROWS": tile.rows,
            "BLOCK_K": triton.next_power_of_2(x.shape[1]),
            "STEPS": tile.steps,
            "num_warps": tile.warps,
            "num_stages": 1,  # the kernel loads ahead by itself
            "maxnreg": tile.registers,
            **self._dependent(),
        }

    def _dependent(self) -> dict[str, bool]:
        """Programmatic dependent launch: told to the kernel, and to its launch."""
        return {"PDL": self.pdl, "launch_pdl": self.pdl}


def _width(m: int) -> int:
    """The narrowest of WIDTHS that holds m rows."""
    return next(width for width in WIDTHS if m <= width)
