"""transformers as the truth for greedy generation: ids and, for each, how close the runner-up was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIE = 1e-4  # logits closer than this may swap between two correct float32 programs


@dataclass(frozen=True)
class Greedy:
    """What transformers generates for one prompt; `gaps[i]` is the lead of `ids[i]` over the second-best logit."""

    ids: list[int]
    gaps: list[float]


def generate_greedy(path: Path, prompts: Sequence[Sequence[int]], new_tokens: int, *, batch: int = 16) -> list[Greedy]:
    """transformers' `generate` in float32, left-padded, prompts of similar length together."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos]) - {None}
    found: dict[int, Greedy] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        longest = max(len(prompts[i]) for i in rows)
        pads = [longest - len(prompts[i]) for i in rows]
        ids = torch.tensor([[0] * pad + list(prompts[i]) for i, pad in zip(rows, pads, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).tolist()
        for row, i in enumerate(rows):
            tokens = out.sequences[row, longest:].tolist()
            end = next((n + 1 for n, token in enumerate(tokens) if token in stops), len(tokens))
            found[i] = Greedy(tokens[:end], gaps[row][:end])
    return [found[i] for i in range(len(prompts))]


def count_ties(ours: Sequence[Sequence[int]], truth: Sequence[Greedy]) -> int:
    """How many outputs part from the truth at a near-tie. Raises `AssertionError` for one that parts elsewhere."""
    ties = 0
    for number, (mine, theirs) in enumerate(zip(ours, truth, strict=True)):
        if list(mine) == theirs.ids:
            continue
        parted = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs.ids, strict=False)) if a != b),
            min(len(mine), len(theirs.ids)),
        )
        gap = theirs.gaps[parted] if parted < len(theirs.gaps) else float("inf")
        assert gap < TIE, (
            f"prompt {number} parts from transformers at output {parted}, where the best logit leads by {gap:.2e}: "
            f"{list(mine)[: parted + 1]} against {theirs.ids[: parted + 1]}"
        )
        ties += 1
    return ties
