"""Output ids of one request to the text that its user sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corellm.sampling_params import SamplingParams
from corellm.text.detokenizer import IncrementalDetokenizer
from corellm.text.stop_strings import StopStrings
from corellm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added: new `text`, and how many of the pushed ids count as output."""

    text: str
    tokens: int


class TextAssembler:
    """Detokenizer and stop strings joined. `stop` is the stop string that ended the text, once one did.

    A stop string ends the text only when it is completed after the first `min_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._tokens = 0

    @property
    def stop(self) -> str | None:
        return self._stops.matched

    def push(self, ids: Sequence[int], *, ended_by_stop_id: bool = False) -> TextDelta:
        """Add `ids`. Those after the token that completes a stop string are dropped and not counted.

        `ended_by_stop_id` says that the last of `ids` is the stop id which ended the request: it counts as a token,
        and its text shows only under `include_stop_str_in_output` (a special token's, also `skip_special_tokens`
        being off).
        """
        silent = ended_by_stop_id and not self._params.include_stop_str_in_output
        shown = ids[:-1] if silent else ids
        if not self._params.stop:
            self._tokens += len(ids)
            return TextDelta(self._detokenizer.push(shown), len(ids))
        pieces: list[str] = []
        for count, token in enumerate(shown, start=1):
            if self.stop is not None:
                return TextDelta("".join(pieces), count - 1)
            self._tokens += 1
            armed = self._tokens > self._params.min_tokens
            pieces.append(self._stops.push(self._detokenizer.push((token,)), armed=armed))
        dropped = self.stop is not None and silent
        return TextDelta("".join(pieces), len(shown) if dropped else len(ids))

    def finish(self) -> str:
        """End the text: whatever was held back and belongs to it."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
