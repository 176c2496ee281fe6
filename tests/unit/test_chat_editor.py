"""A message in the user's editor, for which scripts stand here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from corellm.errors import ChatError
from corellm_tui.chat_editor import edit_text


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("VISUAL", raising=False)
    return folder


def editing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Let the editor be a line of the shell, in which the file is `$1`."""
    script = tmp_path / "an editor"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o700)
    monkeypatch.setenv("EDITOR", f"'{script}'")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("true", "a draft é"),
        ('printf %s " and more" >> "$1"', "a draft é and more"),
        ('printf "new\\n\\n" > "$1.new"; mv "$1.new" "$1"', "new\n"),
        ('printf gone > "$1"; exit 1', "a draft é"),
    ],
)
def test_what_is_saved_is_the_text(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str
) -> None:
    editing(tmp_path, monkeypatch, line)
    assert edit_text("a draft é") == text
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("printf '\\377' >> \"$1\"", "what the editor saved is not UTF-8 text: the byte at offset 1 is 0xff"),
        ('rm "$1"', "message.md: No such file or directory"),
        ('rm "$1"; mkfifo "$1"', "is no regular file"),
    ],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    editing(tmp_path, monkeypatch, line)
    with pytest.raises(ChatError) as found:
        edit_text("a")
    assert message in found.value.message
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("editor", "message"),
    [
        ("/no/such/editor -x", "/no/such/editor cannot be run: No such file or directory; set EDITOR"),
        ("'vi", "No closing quotation; set it to the command of an editor"),
        ("", "there is no editor; set EDITOR"),
        (" ", "there is no editor; set EDITOR"),
    ],
)
def test_an_editor_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, editor: str, message: str) -> None:
    monkeypatch.setenv("EDITOR", editor)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ChatError) as found:
        edit_text("a")
    assert message in found.value.message


def test_halves_of_surrogate_pairs_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editing(tmp_path, monkeypatch, "true")
    assert edit_text("a\ud800b") == "a?b"


def test_a_place_that_takes_no_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ChatError, match="no place for a file to edit: No such file or directory; free space, or set"):
        edit_text("a")
