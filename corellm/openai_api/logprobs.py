"""Log-probabilities in the shapes of the two OpenAI APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from corellm.openai_api.results import PromptLogprob, TokenBytes, TokenLogprob

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
        "top_logprobs": [_likeliest(t.token_id, t.logprob, t.top, token_bytes) for t in tokens]
        if any(t.top for t in tokens)
        else None,
    }


def echo_text(prompt: str | Sequence[int], token_bytes: TokenBytes) -> str:
    """A prompt as an answer that echoes it begins: as it was sent, token ids spelled out."""
    return prompt if isinstance(prompt, str) else b"".join(map(token_bytes, prompt)).decode("utf-8", "replace")


def echo_logprobs(prompt: Sequence[PromptLogprob], text: str, top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    """The part of `choices[].logprobs` that is about an echoed prompt, whose text is `text`.

    A BOS token that the server put in front takes no room in the text.
    """
    raw = [token_bytes(token.token_id) for token in prompt]
    has_bos = bool(raw) and not text.encode("utf-8", "replace").startswith(raw[0])
    offsets: list[int] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    for number, piece in enumerate(raw):
        offsets.append(min(position, len(text)))
        position += 0 if has_bos and number == 0 else len(decoder.decode(piece))
    likeliest = [
        None if token.logprob is None else _likeliest(token.token_id, token.logprob, token.top[:top], token_bytes)
        for token in prompt
    ]
    return {
        "text_offset": offsets,
        "token_logprobs": [None if token.logprob is None else max(token.logprob, UNLIKELY) for token in prompt],
        "tokens": [_legacy_name(piece) for piece in raw],
        "top_logprobs": likeliest if top else None,
    }


def after_echo(echo: dict[str, Any], answer: dict[str, Any], length: int) -> dict[str, Any]:
    """`choices[].logprobs` of an echoed prompt of `length` characters and of what follows it, as one."""
    moved = {**answer, "text_offset": [offset + length for offset in answer["text_offset"]]}
    return {name: None if entries is None else [*entries, *(moved[name] or ())] for name, entries in echo.items()}


def prompt_logprobs(prompt: Sequence[PromptLogprob], top: int, token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first, the `top` likeliest ones and itself, by id."""
    return [None if token.logprob is None else _ranked(token, top, token_bytes) for token in prompt]


def _ranked(token: PromptLogprob, top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    entries = [(token_id, logprob, place) for place, (token_id, logprob) in enumerate(token.top[:top], start=1)]
    entries.append((token.token_id, token.logprob or 0.0, token.rank or 0))
    return {
        str(token_id): {
            "logprob": max(logprob, UNLIKELY),
            "rank": rank,
            "decoded_token": token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in entries
    }


def _likeliest(
    token_id: int, logprob: float, top: Sequence[tuple[int, float]], token_bytes: TokenBytes
) -> dict[str, float]:
    pairs = [*top, (token_id, logprob)]
    return {_legacy_name(token_bytes(token_id)): max(logprob, UNLIKELY) for token_id, logprob in pairs}


def _legacy_name(raw: bytes) -> str:
    r"""A token as a string and dictionary key; parts of a character as OpenAI writes them, `bytes:\xe2\x80`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
