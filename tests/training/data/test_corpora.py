"""Globs, weighted blends, held-out text of its own, and the verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.common.errors import DataError
from mpbridge.training.data.batches import open_corpus
from mpbridge.training.data.sources import find
from mpbridge.training.process import process_group

ROWS = [{"text": f"row {n} " + "x" * n, "title": f"t{n}"} for n in range(40)]


def tokens(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def expected(key: str = "text") -> list[list[int]]:
    return [[*row[key].encode(), 256] for row in ROWS]


def test_tables_and_data_sets_are_refused_with_the_way_to_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for item in (str(tmp_path / "a.parquet"), "hf:owner/name"):
        with pytest.raises(DataError, match=r"load_dataset\(...\)\.to_json\('text.jsonl'\)"):
            find(item)


def test_globs_and_folders_find_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "d.bin"):
        (tmp_path / name).write_text("text")
    assert [path.name for path in find(f"{tmp_path}/*.txt").files] == ["a.txt", "b.txt"]
    assert [path.name for path in find(str(tmp_path)).files] == ["a.txt", "b.txt", "c.md"]
    with pytest.raises(DataError, match="no such file, folder, glob"):
        find(f"{tmp_path}/*.rst")


def lines(path: Path, letter: str, count: int) -> Path:
    path.write_text((letter * 31 + "\n") * count)
    return path


def test_a_blend_reads_each_entry_as_often_as_its_weight_says(tmp_path: Path) -> None:
    # the second is forty times as long and is to be read a third as often
    files = [str(lines(tmp_path / "a.txt", "a", 100)), str(lines(tmp_path / "b.txt", "b", 4000))]
    data = {"corpus": files, "weights": [3.0, 1.0], "cache_dir": str(tmp_path / "cache")}
    with process_group(False):
        dataset = open_corpus(data, seq_length=32, seed=1).dataset("train", 400)
    from_first = sum(ord("a") in dataset[n]["tokens"].tolist() for n in range(400))
    assert from_first == pytest.approx(300, abs=2)
    with pytest.raises(DataError, match="expected a number above 0 for each of the 2 entries"):
        open_corpus(data | {"weights": [1.0]}, seq_length=32, seed=1)


def test_held_out_text_of_its_own_is_not_trained_on(tmp_path: Path) -> None:
    data = {
        "corpus": str(lines(tmp_path / "a.txt", "a", 400)),
        "valid": [str(lines(tmp_path / "v.txt", "v", 400))],
        "cache_dir": str(tmp_path / "cache"),
    }
    corpus = open_corpus(data, seq_length=32, seed=1)
    train, valid = corpus.dataset("train", 20), corpus.dataset("valid", 20)
    assert {int(train[n]["tokens"][1]) for n in range(20)} <= set(b"a\n") | {256}
    assert {int(valid[n]["tokens"][1]) for n in range(20)} <= set(b"v\n") | {256}


def test_the_verb_packs_and_looks(tmp_path: Path, cli) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = ["--out", str(tmp_path / "packed"), "--cache", str(tmp_path / "cache")]
    said = cli("data prepare", source, *out)
    assert "40 documents" in said
    assert f"{tmp_path / 'packed'}_text_document" in said
    (pair,) = json.loads(cli("data inspect", f"{tmp_path / 'packed'}_text_document", "--json"))["pairs"]
    lengths = sorted(map(len, expected()))
    assert (pair["documents"], pair["tokens"], pair["shortest"], pair["longest"]) == (
        40,
        sum(lengths),
        lengths[0],
        lengths[-1],
    )
    assert (pair["largest_token"], pair["dtype"], pair["first"][:3]) == (256, "uint16", list(b"row"))
    with (tmp_path / "packed_text_document.bin").open("ab") as stream:
        stream.truncate(100)
    assert "one of them is truncated" in cli("data inspect", f"{tmp_path / 'packed'}_text_document", code=2)
    for words, wanted in (
        (["prepare"], "no SOURCE"),
        (["inspect"], "nothing to inspect"),
    ):
        assert wanted in cli("data", *words, code=2)
