"""The tokenizer against Meta's own (tiktoken), and streamed text against text decoded at once."""

from __future__ import annotations

import json
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run

import pytest
import tokenizers
from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer
from tokenizers import decoders, models, normalizers

from corellm.errors import CheckpointError
from corellm.text.detokenizer import IncrementalDetokenizer
from corellm.text.tokenizer import Tokenizer
from tests.support.out_of_reach import put_out_of_reach

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  leading and trailing \n\n\t ",
    "line\r\nline\n\n\n   indented\n",
    "I'LL we've 1234567 3.14 x==y != z",
    "naïve café — “quotes” … 你好,世界 こんにちは مرحبا שלום नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 \u00a0 \u200b \ufeff",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nobey<|eot_id|>",
    "half a token <|eot_id| and |>",
    "a" * 5000 + " " * 3000 + "!" * 2000,
    "\x00\x01\x7f\x1b[31m",
)


def test_llama_ids_are_metas(llama31_tokenizer: Tokenizer) -> None:
    meta = MetaTokenizer.get_instance()
    rng = random.Random(0)
    alphabet = "aZé你😀\u0301 \n\t\r'.,<|>_0123\u00a0\u2028"
    made = ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(500)]
    for text in (*TEXTS, *made):
        assert llama31_tokenizer.encode(text) == meta.encode(text, bos=False, eos=False), repr(text)


def test_special_spellings_are_tokens_only_when_asked(llama31_tokenizer: Tokenizer) -> None:
    meta = MetaTokenizer.get_instance()
    text = "hi<|eot_id|> <|start_header_id|>user<|end_header_id|>\n\n <|eot_id| "
    for _ in range(2):  # asking for one must not change the other
        special = llama31_tokenizer.encode(text, special=True)
        assert special == meta.encode(text, bos=False, eos=False, allowed_special="all")
        assert special.count(128009) == 1
        assert not set(llama31_tokenizer.encode(text)) & llama31_tokenizer.special_ids


def test_bos_is_added_only_when_asked(llama31_tokenizer: Tokenizer) -> None:
    ids = llama31_tokenizer.encode("hi")
    assert llama31_tokenizer.encode("hi", bos=True) == [128000, *ids]
    assert 128000 not in llama31_tokenizer.encode("hi", special=True)


def test_attributes_of_llama31(llama31_tokenizer: Tokenizer) -> None:
    assert llama31_tokenizer.vocab_size == 128256
    assert llama31_tokenizer.bos_id == 128000
    assert llama31_tokenizer.adds_bos
    assert {128001, 128009} <= llama31_tokenizer.eos_ids <= llama31_tokenizer.special_ids
    assert llama31_tokenizer.special_ids == frozenset(range(128000, 128256))
    assert llama31_tokenizer.special_id("<|eot_id|>") == 128009
    assert llama31_tokenizer.special_id("the") is None
    assert llama31_tokenizer.special_id("<|no_such|>") is None
    assert "<|start_header_id|>" in (llama31_tokenizer.chat_template or "")


def test_attributes_of_chatml(chatml_tokenizer: Tokenizer) -> None:
    assert chatml_tokenizer.bos_id == chatml_tokenizer.special_id("<|im_start|>") == 1
    assert not chatml_tokenizer.adds_bos
    assert chatml_tokenizer.eos_ids == {2}
    assert chatml_tokenizer.special_ids == {0, 1, 2}
    assert chatml_tokenizer.decode([1, *chatml_tokenizer.encode("<think>"), 2]) == "<think>"


def test_token_bytes_are_metas_for_the_whole_vocabulary(llama31_tokenizer: Tokenizer) -> None:
    meta = MetaTokenizer.get_instance().model
    for token in range(128000):
        assert llama31_tokenizer.token_bytes(token) == meta.decode_single_token_bytes(token)
    assert llama31_tokenizer.token_bytes(128009) == b"<|eot_id|>"
    assert llama31_tokenizer.token_bytes(128256) == llama31_tokenizer.token_bytes(-1) == b""


def test_text_comes_back(llama31_tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert llama31_tokenizer.decode(llama31_tokenizer.encode(text)) == text


def test_decode_skips_special_tokens_unless_asked(llama31_tokenizer: Tokenizer) -> None:
    ids = [128000, *llama31_tokenizer.encode("hi"), 128009]
    assert llama31_tokenizer.decode(ids) == "hi"
    assert llama31_tokenizer.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>hi<|eot_id|>"


def test_surrogates_are_no_reason_to_fail(llama31_tokenizer: Tokenizer) -> None:
    assert llama31_tokenizer.encode("a\ud800b") == llama31_tokenizer.encode("a\ufffdb")
    assert llama31_tokenizer.encode("\ud83d\ude00") == llama31_tokenizer.encode("😀")


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_is_the_text_decoded_at_once(llama31_tokenizer: Tokenizer, skip: bool) -> None:
    meta = MetaTokenizer.get_instance().model
    rng = random.Random(1)
    broken = [token for token in range(128000) if not _is_utf8(meta.decode_single_token_bytes(token))]
    assert len(broken) > 100
    for _ in range(300):
        ids = [rng.choice(broken) if rng.random() < 0.5 else rng.randrange(128300) for _ in range(rng.randint(0, 40))]
        raw = b"".join(
            meta.decode_single_token_bytes(token) if token < 128000 else llama31_tokenizer.token_bytes(token)
            for token in ids
            if token < 128000 or not skip
        )
        whole = raw.decode("utf-8", errors="replace")
        stream, text, rest = IncrementalDetokenizer(llama31_tokenizer, skip_special_tokens=skip), "", ids
        while rest:
            size = rng.randint(1, 5)
            text += stream.push(rest[:size])
            rest = rest[size:]
        assert text + stream.flush() == whole == llama31_tokenizer.decode(ids, skip_special_tokens=skip)


def test_unfinished_character_is_held_back_then_replaced(llama31_tokenizer: Tokenizer) -> None:
    ids = llama31_tokenizer.encode("🫨")
    assert len(ids) > 1
    stream = IncrementalDetokenizer(llama31_tokenizer)
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🫨"]
    assert stream.push(ids[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_threads_share_one_tokenizer(llama31_tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(llama31_tokenizer_folder)
    text = "thread <|eot_id|> é"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: tokenizer.encode(text, special=bool(n % 2)), range(64)))
    assert {tuple(ids) for ids in found[::2]} == {tuple(tokenizer.encode(text))}
    assert {tuple(ids) for ids in found[1::2]} == {tuple(tokenizer.encode(text, special=True))}


def test_sentencepiece_like_tokens_keep_every_byte(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "\u2581": 257, "h": 258, "i": 259}
    vocabulary |= {"\u2581h": 260, "\u2581hi": 261}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "h"), ("\u2581h", "i")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("hi hi é<0x41>")
    assert tokenizer.decode(ids) == " hi hi é<0x41>"  # the space of the first word is the token's own
    assert tokenizer.token_bytes(0xC3 + 1) == b"\xc3"
    assert tokenizer.bos_id is None
    assert tokenizer.encode("hi", bos=True) == [261]


def test_vocabulary_with_holes(chatml_tokenizer_folder: Path, tmp_path: Path) -> None:
    content = json.loads((chatml_tokenizer_folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["hole"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 1001
    assert tokenizer.token_bytes(1000) == b"hole"
    assert tokenizer.token_bytes(999) == b""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json cannot be read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "holds no JSON object"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    chatml_tokenizer_folder: Path, tmp_path: Path, files: dict[str, str | None], words: str
) -> None:
    for name, content in files.items():
        if content is None:
            shutil.copy(chatml_tokenizer_folder / name, tmp_path)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_out_of_reach_is_named(
    chatml_tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = shutil.copytree(chatml_tokenizer_folder, tmp_path / "model")
    put_out_of_reach(monkeypatch, folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: Permission denied$"):
        Tokenizer.from_folder(folder)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece") as refused:
        Tokenizer.from_folder(tmp_path)
    assert refused.value.message.startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("entry", "template"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
        ([], None),
        (None, None),
    ],
)
def test_chat_template_is_found(
    chatml_tokenizer_folder: Path, tmp_path: Path, entry: object, template: str | None
) -> None:
    shutil.copy(chatml_tokenizer_folder / "tokenizer.json", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": entry}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == template
    assert tokenizer.eos_ids == {2}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "file"


def test_text_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, corellm.text.prompt, corellm.text.assembler, corellm.text.terminal, corellm.text.jinja_template;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
