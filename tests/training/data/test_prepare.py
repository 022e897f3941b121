"""Preprocessing: dirty records, several keys, the cache."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from mpbridge.common.errors import DataError
from mpbridge.training.data import prepare as prepare_module
from mpbridge.training.data.look import Skip, Text, records
from mpbridge.training.data.prepare import pieces, prepare
from mpbridge.training.data.sources import find, stdlib_files, tokenizer

DIRTY = [
    '{"text": "good"}', '{"text": null}', '{"text": 5}', '{"text": ""}', '{"text": ["ok", null, ""]}',
    '{"other": "x"}',
]  # fmt: skip


def _broken() -> object:
    """A tokenizer factory that fails on the first text."""

    class Broken:
        eod, vocab_size, unique_identifiers = 1, 300, {"class": "Broken"}

        def tokenize(self, text: str) -> list[int]:
            raise RuntimeError("no tokens today")

    return Broken()


def _tokens(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def _lines(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


def test_dirty_records_are_skipped_and_counted(tmp_path: Path) -> None:
    done = prepare([_lines(tmp_path / "a.jsonl", DIRTY)], cache=tmp_path / "cache")
    assert done.skipped == {"null": 2, "not text": 1, "empty": 2, "key missing": 1}
    assert sum(done.skipped.values()) == 6
    assert _tokens(done.prefixes[0]) == [[*b"good", 256], [*b"ok", 256]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(b'{"text": "a"', "not JSON", id="cut"),
        pytest.param(b"", "blank line", id="blank"),
        pytest.param(b'{"text": "\xff"}', "not UTF-8", id="bytes"),
        pytest.param(b'{"text": "\\ud800"}', "not UTF-8", id="half-a-surrogate"),
        pytest.param(b"7", "not text", id="bare-number"),
        pytest.param(b'{"text": "  \\n"}', "empty", id="white-space"),
    ],
)
def test_each_malformed_record_has_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    ends = [16, 17 + len(line), 33 + len(line)]
    assert list(records(path, ["text"])) == [
        Text("text", "one", ends[0]),
        Skip("text", reason, ends[1]),
        Text("text", "two", ends[2]),
    ]


def test_every_key_gets_its_pair_even_without_a_document(tmp_path: Path, cli) -> None:
    source = _lines(tmp_path / "a.jsonl", ['{"text": "a", "title": null}'])
    places = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert "1 null" in cli("data prepare", source, "--keys", "text", "title", *places)
    assert {path.name for path in tmp_path.glob("out*")} == {
        f"out_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx")
    }


def test_nothing_usable_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable text \(2 not JSON"):
        prepare([_lines(tmp_path / "a.jsonl", ["x", "y"])], cache=tmp_path / "cache")


def test_same_content_is_prepared_once_and_other_content_again(tmp_path: Path) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text("hello\n")
    first = prepare([source], cache=cache)
    moved = source.rename(tmp_path / "b.txt")
    again = prepare([moved], cache=cache)
    assert not first.cached
    assert again.cached
    assert again.prefixes == first.prefixes
    moved.write_text("hallo\n")
    assert prepare([moved], cache=cache).prefixes != first.prefixes


@pytest.mark.parametrize("gone", ["prepared.json", "text.bin"])
def test_a_damaged_entry_of_the_cache_is_named_with_its_cure(tmp_path: Path, gone: str) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text("hello\n")
    folder = prepare([source], cache=cache).folder
    (folder / gone).unlink()
    with pytest.raises(DataError, match=rf"{folder} is damaged .*; delete that folder"):
        prepare([source], cache=cache)


def test_a_name_in_upper_case_is_read_by_lines_too(tmp_path: Path) -> None:
    assert prepare([_lines(tmp_path / "a.JSONL", ['"one"', '"two"'])], cache=tmp_path / "cache").documents == 2


def test_a_failing_tokenizer_ends_with_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    files = [_lines(tmp_path / name, ["text"]) for name in ("a.txt", "b.txt")]
    command = ["data", "prepare", *map(str, files), "--cache", str(tmp_path / "cache")]
    assert "no tokens today" in cli(*command, "--tokenizer", f"{Path(__file__).stem}:_broken", code=2)
    assert not (tmp_path / "cache").exists()


def test_a_failure_while_writing_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    monkeypatch.setattr(prepare_module, "_encode", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DataError, match="disk full"):
        prepare([source], cache=tmp_path / "new" / "cache")
    assert not (tmp_path / "new").exists()


def test_a_copy_without_room_leaves_nothing_and_is_no_misuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    def copied(source: Path, part: Path) -> None:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(part))

    source = _lines(tmp_path / "a.txt", ["text"])
    monkeypatch.setattr(prepare_module.shutil, "copyfile", copied)
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "new/folder/out")]
    assert "No space left" in cli("data prepare", source, *places, code=1, error=True)
    assert not (tmp_path / "new").exists()


def test_pieces_are_the_text_and_end_behind_lines() -> None:
    text = "".join(f"line {n}\n" for n in range(500))
    cut = list(pieces(text, 100))
    assert "".join(cut) == text
    assert all(part.endswith("\n") and len(part) <= 100 for part in cut)
    assert "".join(pieces("x" * 1001, 100)) == "x" * 1001


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_refused_with_the_way_to_lines(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(DataError, match=r"one JSON array, expected JSON lines.*jq -c"):
        prepare([tmp_path / "a.json"], cache=tmp_path / "cache")


class Prefixed:
    """As SentencePiece's dummy prefix: one token before whatever text it is given, and one a character."""

    eod, vocab_size, unique_identifiers = 1, 300, {"class": "Prefixed"}

    def tokenize(self, text: str) -> list[int]:
        return [2, *text.encode()]


def prefixed() -> Prefixed:
    """A tokenizer factory."""
    return Prefixed()


def test_a_document_is_packed_with_the_tokens_that_it_has_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    text = "".join(f"line {n} of a text\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text)
    own = {"tokenizer_name": f"{Path(__file__).stem}:prefixed", "cache": tmp_path / "cache"}
    found = _tokens(prepare([tmp_path / "a.txt"], **own).prefixes[0])
    assert [token for sequence in found for token in sequence] == [*Prefixed().tokenize(text), 1]
    # and it is still not one sequence, which a split could not divide
    assert len(found) > 8
    assert all(sequence[-1] == 10 and len(sequence) <= 1025 for sequence in found[:-1])
    monkeypatch.setattr("mpbridge.training.data.prepare.LONGEST", 1000)
    (tmp_path / "b.txt").write_text(text + "more")
    with pytest.raises(DataError, match=r"b\.txt: a document of .* characters.*split -C"):
        prepare([tmp_path / "b.txt"], **own)


def test_stdlib_corpus_is_real_text_in_a_fixed_order() -> None:
    files = stdlib_files()
    assert files == stdlib_files()
    assert len(files) > 100
    assert list(files) != sorted(files)


def test_every_unusable_path_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        find([str(tmp_path / "no.txt"), str(tmp_path)])
    assert "no.txt" in str(error.value)
    assert "a folder without" in str(error.value)


def test_end_of_document_is_no_byte() -> None:
    tok = tokenizer("byte")
    assert tok.eod >= 256
    assert tok.tokenize("hé") == list("hé".encode())
