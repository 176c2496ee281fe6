"""Log-probabilities in the shapes of the two OpenAI APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from corellm.openai_api.results import TokenBytes, TokenLogprob

UNLIKELY = -9999.0  # OpenAI's figure for a token that is all but impossible; JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions. `bytes` is exact where a token is a part of a character."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, UNLIKELY), "bytes": list(raw)}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], text: str, token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions: parallel lists. `text_offset` counts characters of `text`.

    Each of `top_logprobs` maps the k likeliest tokens and the sampled one; it is null where only the sampled token's
    log-probability was asked for.
    """
    offsets: list[int] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    for token in tokens:
        # Tokens of a cut-off stop string lie behind the text's end.
        offsets.append(min(position, len(text)))
        position += len(decoder.decode(token_bytes(token.token_id)))
    return {
        "text_offset": offsets,
        "token_logprobs": [max(token.logprob, UNLIKELY) for token in tokens],
        "tokens": [_legacy_name(token_bytes(token.token_id)) for token in tokens],
        "top_logprobs": [_likeliest(token, token_bytes) for token in tokens] if any(t.top for t in tokens) else None,
    }


def _likeliest(token: TokenLogprob, token_bytes: TokenBytes) -> dict[str, float]:
    pairs = [*token.top, (token.token_id, token.logprob)]
    return {_legacy_name(token_bytes(token_id)): max(logprob, UNLIKELY) for token_id, logprob in pairs}


def _legacy_name(raw: bytes) -> str:
    r"""A token as a string and dictionary key; parts of a character as OpenAI writes them, `bytes:\xe2\x80`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
