"""Rotary position embedding: frequencies, and a table of their cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corellm.kernels.inputs import Rope
from corellm.models.llama.spec import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair of a head: float32 [head_dim / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    return frequencies if scaling is None else _scaled(frequencies, scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended linearly."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    slowed = frequencies / scaling.factor
    kept = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - kept) * slowed + kept * frequencies
    return torch.where(wavelengths > longest, slowed, torch.where(wavelengths < shortest, frequencies, blended))


class RotaryTable:
    """Rotary factors of every position, computed in float32 and rounded to `dtype`: see `Rope`."""

    def __init__(self, frequencies: Tensor, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)[:, None].to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)[:, None].to(device)

    def lookup(self, positions: Tensor) -> Rope:
        """Factors for positions [n]."""
        return Rope(cos=self._cos.index_select(0, positions), sin=self._sin.index_select(0, positions))
