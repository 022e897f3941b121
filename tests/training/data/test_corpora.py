"""Tables, globs, weighted blends, held-out text of its own, preparations that go on where they were interrupted, and the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpbridge.cli.main import main
from mpbridge.common.errors import DataError
from mpbridge.training.data import prepare as prepare_module
from mpbridge.training.data.datasets import open_corpus
from mpbridge.training.data.prepare import prepare
from mpbridge.training.data.sources import find
from tests import forked

ROWS = [{"text": f"row {n} " + "x" * n, "title": f"t{n}"} for n in range(40)]


def tokens(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def expected(key: str = "text") -> list[list[int]]:
    return [[*row[key].encode(), 256] for row in ROWS]


def table(path: Path, *, stream: bool = True) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="datasets brings it (pip install -e '.[hf]')")
    import pyarrow.parquet as parquet

    made = arrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        parquet.write_table(made, path, row_group_size=7)
        return path
    with (arrow.ipc.new_stream if stream else arrow.ipc.new_file)(str(path), made.schema) as sink:
        sink.write_table(made, max_chunksize=7)
    return path


@pytest.mark.parametrize(
    ("name", "stream"), [("a.parquet", True), ("a.arrow", True), ("a.arrow", False)], ids=["parquet", "stream", "file"]
)
def test_a_table_is_read_row_by_row(tmp_path: Path, name: str, stream: bool) -> None:
    file = table(tmp_path / name, stream=stream)
    done = prepare([file], cache=tmp_path / "cache", keys=["text", "title", "none"])
    assert (tokens(done.prefixes[0]), tokens(done.prefixes[1])) == (expected(), expected("title"))
    assert done.skipped == {"key missing": 40}


@pytest.mark.filterwarnings("ignore")  # the library's own, of what it pickles
def test_a_data_set_of_the_library_is_its_arrow_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    # what load_dataset takes as an id: a repository's, or a folder's
    files = find(f"hf:{tmp_path / 'rows'}").files
    assert {path.suffix for path in files} == {".arrow"}
    done = prepare(files, cache=tmp_path / "cache", keys=["text"])
    assert tokens(done.prefixes[0]) == expected()
    with pytest.raises(DataError, match="this data set is not on this machine and cannot be downloaded"):
        find(f"hf:{tmp_path / 'none'}")


def test_a_slice_of_a_split_is_refused_with_the_way_to_a_file() -> None:
    with pytest.raises(DataError, match="a slice of a split is not supported"):
        find("hf:owner/name::train[:10%]")


def test_a_damaged_table_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="datasets brings it (pip install -e '.[hf]')")
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"no table at all")
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            prepare([tmp_path / name], cache=tmp_path / "cache")


def test_globs_and_folders_find_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "d.bin"):
        (tmp_path / name).write_text("text")
    assert [path.name for path in find(f"{tmp_path}/*.txt").files] == ["a.txt", "b.txt"]
    assert [path.name for path in find(str(tmp_path)).files] == ["a.txt", "b.txt", "c.md"]
    with pytest.raises(DataError, match="no such file, folder, glob, data set"):
        find(f"{tmp_path}/*.rst")


def lines(path: Path, letter: str, count: int) -> Path:
    path.write_text((letter * 31 + "\n") * count)
    return path


def test_a_blend_reads_each_entry_as_often_as_its_weight_says(tmp_path: Path) -> None:
    # the second is forty times as long and is to be read a third as often
    files = [str(lines(tmp_path / "a.txt", "a", 100)), str(lines(tmp_path / "b.txt", "b", 4000))]
    data = {"corpus": files, "weights": [3.0, 1.0], "cache_dir": str(tmp_path / "cache")}
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


FUSSY = '''
from pathlib import Path

class Fussy:
    """Bytes; fails on a word while a file is there."""
    eod, vocab_size, unique_identifiers = 256, 300, {"class": "Fussy"}

    def tokenize(self, text):
        if text.startswith("poison") and Path(__file__).with_name("switch").exists():
            raise RuntimeError("poisoned")
        return list(text.encode())
'''


def test_a_preparation_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "ONE_WORKER", 1000)
    monkeypatch.setattr(prepare_module, "get_context", lambda _: forked._context())
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fussy_for_a_while.py").write_text(FUSSY)
    files = []
    for number, start in enumerate(["fine", "fine", "fine", "poison"]):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(f"{start} {number} " + "x" * 1000)
    (tmp_path / "switch").write_text("")
    settings: dict[str, Any] = {
        "cache": tmp_path / "cache",
        "tokenizer_name": "fussy_for_a_while:Fussy",
        "workers": 1,
    }
    with pytest.raises(DataError, match="poisoned"):
        prepare(files, **settings)
    (tmp_path / "switch").unlink()
    told: list[tuple[int, int]] = []
    done = prepare(files, **settings, told=lambda ready, total: told.append((ready, total)))
    sizes = [path.stat().st_size for path in files]
    assert told == [(sum(sizes[:3]), sum(sizes)), (sum(sizes), sum(sizes))]
    assert [bytes(sequence[:6]) for sequence in tokens(done.prefixes[0]) if sequence[0] in b"fp"] == [
        b"fine 0",
        b"fine 1",
        b"fine 2",
        b"poison",
    ]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [done.folder.name]


def test_the_verb_packs_and_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = ["--out", str(tmp_path / "packed"), "--cache", str(tmp_path / "cache")]
    assert main(["data", "prepare", str(source), *out]) == 0
    said = capsys.readouterr().out
    assert "40 documents" in said
    assert f"{tmp_path / 'packed'}_text_document" in said
    assert main(["data", "inspect", f"{tmp_path / 'packed'}_text_document", "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
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
    assert main(["data", "inspect", f"{tmp_path / 'packed'}_text_document"]) == 2
    assert "one of them is truncated" in capsys.readouterr().err
    for words, wanted in (
        (["prepare"], "no SOURCE"),
        (["inspect"], "nothing to inspect"),
        (["prepare", str(source), "--workers", "0"], "expected at least 1"),
    ):
        assert main(["data", *words]) == 2
        assert wanted in capsys.readouterr().err
