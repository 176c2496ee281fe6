"""What a request must be to be let in: what the scheduler and the workers rely on afterwards."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from corellm.comms.messages import Sampling
from corellm.engine.sequence import Sequence
from corellm.errors import InvalidRequestError, PromptTooLongError
from corellm.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can hold: sequences at once, tokens a step, tokens a sequence, token ids."""

    max_seqs: int
    max_batch_tokens: int
    max_model_len: int
    vocab: int


def check_request(sequence: Sequence, limits: Limits, room: int) -> None:
    """Refuse what is malformed, or can never fit `room` tokens of prompt and output.

    Raises `InvalidRequestError` or `PromptTooLongError`, with the field in `param`.
    """
    prompt = sequence.prompt_len
    if prompt == 0:
        raise InvalidRequestError("the prompt has no tokens; it must have at least one", "prompt")
    ids = sequence.token_array()
    _check_ids("prompt", (int(ids.min()), int(ids.max())), limits.vocab)  # of thousands, the extremes tell
    _check_sampling(sequence.sampling, limits.vocab)
    if sequence.limit > room:
        where = "the context" if room == limits.max_model_len else "the KV cache"
        raise PromptTooLongError(
            f"{prompt} prompt tokens and max_tokens {sequence.sampling.max_tokens} make {sequence.limit}; "
            f"{where} holds {room}: shorten the prompt or lower max_tokens",
            "prompt" if prompt >= room else "max_tokens",
        )


def _check_sampling(sampling: Sampling, vocab: int) -> None:
    """What a worker relies on. Front ends check with better words; this keeps a faulty one from hurting the others."""
    _check_ids("logit_bias", sampling.bias_ids, vocab)
    _check_ids("stop_token_ids", sampling.stop_ids, vocab)
    checks = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "from 0 to max_tokens"),
        ("temperature", 0 <= sampling.temperature < math.inf, "0 or a positive number"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, "a positive number"),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= min(MAX_LOGPROBS, vocab), "0 to 20"),
        ("prompt_logprobs", 0 <= (sampling.prompt_logprobs or 0) <= min(MAX_LOGPROBS, vocab), "0 to 20"),
        ("logit_bias", len(sampling.bias_ids) == len(sampling.bias_values), "one value for each id"),
    )
    for name, is_right, allowed in checks:
        if not is_right:
            raise InvalidRequestError(f"{name} is out of range; it must be {allowed}", name)


def _check_ids(name: str, ids: Collection[int], vocab: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab:
        worst = low if low < 0 else high
        raise InvalidRequestError(f"{name} holds token id {worst}; the model's ids are 0 to {vocab - 1}", name)
