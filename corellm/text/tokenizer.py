"""Text to token ids and back, on the Rust `tokenizers` package alone."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from corellm.checkpoint import is_there, naming
from corellm.errors import CheckpointError
from corellm.text.longest_token import longest_token

# Meta's own list of Llama 3.1's stop tokens, by name; a checkpoint has those that its vocabulary names.
LLAMA_STOP_TOKENS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's vocabulary. Threads may share one instance.

    `vocab_size` is the highest id plus one. `special_ids` are the control tokens, of which `eos_ids` end a text.
    `adds_bos` says whether the checkpoint expects its BOS token before plain text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None) -> None:
        """`config` is the content of `tokenizer_config.json`. Raises `CheckpointError` for an unknown decoder."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a special token spelled out in text is text
        self._backend = backend
        self._byte_level, self._byte_fallback = _decoder_kind(backend)
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._pieces: dict[int, bytes] = {}  # filled as ids are met; all of a large vocabulary would slow the start
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id: int | None = self._configured(config, "bos_token", "<|begin_of_text|>")
        eos_id = self._configured(config, "eos_token", None)
        ends = {eos_id, *map(self.special_id, LLAMA_STOP_TOKENS)}
        self.eos_ids: frozenset[int] = frozenset(end for end in ends if end is not None)
        self.adds_bos: bool = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]
        self.chat_template = chat_template
        self.special_tokens: dict[str, str] = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(name))) is not None
        }

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where they exist, `tokenizer_config.json` and `chat_template.jinja`.

        Raises `CheckpointError` when a file is missing or damaged.
        """
        source = path / "tokenizer.json"
        if not is_there(source):
            raise CheckpointError(f"{path} has no tokenizer.json; download the checkpoint's tokenizer files too")
        try:
            backend = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the Rust side raises nothing more specific
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{source} cannot be read: {reason}; download it again") from error
        config = _read_config(path / "tokenizer_config.json")
        template = _chat_template(path, config)
        with naming(path):
            return cls(backend, config, template)

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Token ids of `text`.

        With `special`, the spelling of a special token becomes that token; otherwise it is encoded like any other
        text. `bos` puts the BOS token in front, where the vocabulary has one; nothing else does. Half of a surrogate
        pair, which no UTF-8 text can hold, counts as U+FFFD.
        """
        backend = self._recognising if special else self._backend
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # The batch call without offsets takes half the time of `encode`, and lets other Python threads run.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self.bos_id, *ids] if bos and self.bos_id is not None else ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at the least, at no cost; 0 where only encoding it can tell."""
        longest = self._longest_token
        return 0 if longest is None else -(-len(text.encode("utf-8", "surrogatepass")) // longest)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD, as Python's `errors="replace"` has it."""
        return self.to_bytes(ids, skip_special_tokens=skip_special_tokens).decode(errors="replace")

    def to_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of `ids`, one after the other."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(token) for token in ids if token not in hidden])

    def token_bytes(self, id: int) -> bytes:
        """Exactly the bytes that `id` stands for, which need not be whole characters; none for an unknown id."""
        piece = self._pieces.get(id)
        if piece is not None:
            return piece
        if not 0 <= id < self.vocab_size:
            return b""
        piece = self._pieces[id] = self._piece(id)
        return piece

    def special_id(self, text: str) -> int | None:
        """The id of the special token spelled `text`."""
        found: int | None = self._backend.token_to_id(text)
        return found if found in self.special_ids else None

    @property
    def added_tokens(self) -> frozenset[str]:
        """Spellings that are cut out of a text before it is tokenized, special or not."""
        return frozenset(self._added.values())

    @cached_property
    def _recognising(self) -> tokenizers.Tokenizer:
        # The flag belongs to the instance, and flipping it would race with other threads. Few uses need this copy.
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self._backend, _BYTE_OF)  # a walk through all of the vocabulary, which few prompts need

    def _configured(self, config: dict[str, Any], name: str, fallback: str | None) -> int | None:
        text = _token_text(config.get(name, fallback))
        found: int | None = None if text is None else self._backend.token_to_id(text)
        return found

    def _piece(self, id: int) -> bytes:
        added = self._added.get(id)
        if added is not None:
            return added.encode()
        token: str | None = self._backend.id_to_token(id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:
                return token.encode()  # a token that was never mapped to the byte alphabet
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: a printable byte stands for itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte alphabet, and if not, whether `<0x41>` is a byte."""

    def shows(token: str, text: str) -> bool:
        return backend.decoder is not None and backend.decoder.decode(["x", token, "x"]) == f"x{text}x"

    if shows("\u0120", " "):
        return True, False
    if shows("\u2581", " "):
        return False, shows("<0x41>", "A")
    raise CheckpointError(
        f"decoder {type(backend.decoder).__name__} in tokenizer.json is not supported; "
        "CoreLLM reads byte-level BPE and SentencePiece-like BPE"
    )


def _token_text(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return config


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
