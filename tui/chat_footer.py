"""The line below an answer: how fast it came, how many tokens, how full the context is."""

from __future__ import annotations

from corellm.chat.backend import AnswerEnd

from . import quantities

_NOTES = {"length": "cut off at the token limit", "interrupted": "interrupted", "tool_calls": "calls a tool"}
_FULL = "cut off at the end of the context"  # which is a limit as well, and no setting raises it


def footer(end: AnswerEnd, context: int | None) -> str:
    """One line, without what is not known: TTFT, tokens a second after the first, tokens in and out, context used."""
    parts = [f"TTFT {_seconds(end.first_token_s)}"]
    prompt, output = end.prompt_tokens, end.output_tokens
    if output is not None and output > 1 and end.total_s > end.first_token_s:
        parts.append(f"{quantities.rate((output - 1) / (end.total_s - end.first_token_s))} tok/s")
    if prompt is not None:
        parts.append(f"in {prompt:,}" + (f" ({end.cached_tokens:,} cached)" if end.cached_tokens is not None else ""))
    if output is not None:
        parts.append(f"out {output:,}")
    used = prompt + output if prompt is not None and output is not None else None
    if used is not None:
        parts.append(f"context {used:,}" + (f" of {context:,}" if context is not None else ""))
    is_full = used is not None and context is not None and used >= context
    note = _FULL if is_full and end.finish_reason == "length" else _NOTES.get(end.finish_reason)
    return " · ".join([*parts, note] if note is not None else parts)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
