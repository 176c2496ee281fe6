"""Answers held to a JSON schema: which tokens may come next. llguidance does the work; this is all that knows it.

Text is known to the engine here and nowhere else: a grammar speaks of bytes, so the bytes of every token must be known
where its state is, and the state must be where the tokens come in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par

from corellm.comms.codec import i32
from corellm.comms.messages import I32
from corellm.errors import InvalidRequestError
from corellm.sampling_params import JsonConstraint

LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # a few milliseconds a mask, as the next one
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # the verbose ones tell what the answer says
)
# Between the tokens of JSON. Without a bound, a model that has nothing to say writes newlines for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
MAX_REASON = 200  # characters of the library's own words in an error
_NOISE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\n\s*1 \| .*|<non-verbose/>", re.DOTALL)


class _Tokens:
    """A vocabulary in the shape that llguidance reads. `encode` gives the tokens in which forced bytes are written."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], encode: Callable[[bytes], list[int]], special_ids: Iterable[int], eos_id: int
    ) -> None:
        self._encode = encode
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_id

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def make_vocabulary(
    tokens: Sequence[bytes],
    encode: Callable[[bytes], list[int]],
    *,
    special_ids: Iterable[int],
    eos_ids: Iterable[int],
) -> LLTokenizer:
    """`tokens` holds the bytes of every id of the model, none for an id that no text has; `eos_ids` end an answer."""
    ends = sorted(eos_ids)
    wrapper = TokenizerWrapper(_Tokens(tokens, encode, special_ids, ends[0]))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends, slices=LLTokenizer.json_slices())


def load_vocabulary(folder: Path, size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """The vocabulary of a checkpoint whose logits are `size` wide.

    Raises `CheckpointError` when its tokenizer files are missing or damaged, `InvalidRequestError` when nothing in it
    ends an answer.
    """
    from corellm.text.tokenizer import Tokenizer  # loads a Rust library of its own

    tokenizer = Tokenizer.from_folder(folder)
    ends = {token for token in tokenizer.eos_ids.union(eos_ids) if token < size}
    if not ends:
        raise InvalidRequestError("the model has no token that ends an answer, so none can be held to a JSON schema")

    def encode(text: bytes) -> list[int]:
        return tokenizer.encode(text.decode("utf-8", "replace"))

    tokens = [tokenizer.token_bytes(token) for token in range(size)]
    special = [token for token in tokenizer.special_ids if token < size]
    return make_vocabulary(tokens, encode, special_ids=special, eos_ids=ends)


def compile_grammar(vocabulary: LLTokenizer, constraint: JsonConstraint) -> LLMatcher:
    """The grammar of a constraint, at its beginning.

    Raises `InvalidRequestError` for a schema that is not one, or that cannot be held to.
    """
    matcher = LLMatcher(vocabulary, _grammar(constraint), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refused(constraint, matcher.get_error())
    return matcher


def refused(constraint: JsonConstraint, reason: str) -> InvalidRequestError:
    """The error of a constraint that cannot be used, with the library's reason on one line."""
    words = " ".join(_NOISE.sub("", reason).replace("NoExtensionBias", "no JSON value satisfies it").split())
    words = words if len(words) <= MAX_REASON else f"{words[:MAX_REASON]}…"
    return InvalidRequestError(f"the JSON schema of {constraint.param} cannot be used: {words}", constraint.param)


def next_masks(executor: LLExecutor, matchers: Sequence[LLMatcher], vocab: int) -> list[I32]:
    """For each grammar the tokens that may come next, a bit for each id as `StepPlan.masks` has it.

    The interpreter's lock is free meanwhile. A grammar that is found too complex here is in an error state afterwards.
    """
    masks = np.zeros((len(matchers), -(-vocab // 32)), dtype=np.int32)
    fill_next_token_bitmask_par(executor, [(matcher, row) for row, matcher in enumerate(matchers)], masks)
    return [i32(mask) for mask in masks]


def _grammar(constraint: JsonConstraint) -> str:
    try:
        schema = json.loads(constraint.schema)
    except (ValueError, RecursionError):
        raise refused(constraint, "it is not JSON, or nested too deeply") from None
    if not isinstance(schema, dict):
        raise refused(constraint, "it must be a JSON object")
    # In this place options hold for the whole schema, whatever a schema from outside puts there.
    schema["x-guidance"] = {
        "whitespace_pattern": WHITESPACE,
        "coerce_one_of": True,  # which of the alternatives it is, the answer itself must tell
        "lenient": constraint.lenient,
    }
    more = f" ({json.dumps(constraint.separator)} value)*" if constraint.separator else ""
    return LLMatcher.grammar_from_lark(f"start: value{more}\nvalue: %json {json.dumps(schema)}\n")
