"""What `train` refuses before it builds anything, `check` and `launch` refuse too, in the same words, all at once, and without torch."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import pytest

from tests.light import loaded_by

LAUNCH = ["launch", "--nodes", "1", "--gpus-per-node", "1", "--cpu", "--", "train", "checkpoint.save=run"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # dev brings tokenizers, an environment without extras does not
    monkeypatch.setattr("mpbridge.training.data.look.find_spec", lambda name: name)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.bin").write_bytes(bytes(4))
    (tmp_path / "cut.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1000, 1001))
    (tmp_path / "two.bin").write_bytes(bytes(4))
    (tmp_path / "odd.bin").write_bytes(bytes(4))
    (tmp_path / "odd.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 1, 1, 0, 2, 0, 1, 7))
    (tmp_path / "hollow.bin").touch()
    (tmp_path / "hollow.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 1, 1, 0, 2, 0, 1, 2)
    )
    (tmp_path / "two.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 1, 1, 0, 2, 0, 1, 2))
    (tmp_path / "tok").mkdir()
    words = {"a": 0, "b": 1, "c": 700}
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": words}}))
    return tmp_path


FAULTS = [
    pytest.param(["model.vocab_size=100"], "the tokenizer has 259 tokens", id="vocabulary below the bytes"),
    pytest.param(["data.tokenizer=tok", "data.end_of_text=a", "model.vocab_size=700"], "has 701 tokens", id="vocabulary below the files'"),
    pytest.param(["data.tokenizer=tok"], "does not say which token ends a text", id="no end of text"),
    pytest.param(["data.tokenizer=tok", "data.end_of_text=zz"], "no such token", id="another end of text"),
    pytest.param(["data.end_of_text=5"], "data.tokenizer=byte always ends a text with 256", id="end of bytes"),
    pytest.param(["data.tokenizer=nowhere/x"], "data.tokenizer='nowhere/x'", id="no tokenizer"),
    pytest.param(["logger.trackers=[nope]"], "expected a list of tensorboard, wandb, mlflow", id="unknown tracker"),
    pytest.param(["data.corpus=nope"], "data.corpus=nope: nope: no such file", id="no corpus"),
    pytest.param(["data.corpus=[]"], "at least one file", id="a corpus of nothing"),
    pytest.param(["checkpoint.pretrained_checkpoint=file"], "file: a file", id="weights in a file"),
    pytest.param(["data.corpus=empty"], "a folder without", id="empty folder"),
    pytest.param(["data.corpus=blank.txt"], "no usable text (1 empty)", id="blank text"),
    pytest.param(["data.corpus=other.jsonl"], "no usable text (1 key missing)", id="another key"),
    pytest.param(["data.corpus=cut"], "it is truncated", id="damaged pair"),
    pytest.param(["data.corpus=odd"], "its last document ends behind sequence 7, and it has 2", id="a pair's documents"),
    pytest.param(["data.corpus=hollow"], "hollow.bin has 0 bytes", id="a pair without tokens"),
    pytest.param(["data.corpus=two", "data.seq_length=4"], "leaves nothing for 'valid'", id="nothing left for a part"),
    pytest.param(["data.corpus=[two, other.jsonl]"], "are mixed", id="mixed kinds"),
    pytest.param(["data.valid=nope"], "data.valid=nope: nope: no such file", id="no validation text"),
    pytest.param(["data.weights=[1, 2]"], "for each entry of data.corpus, which has 1", id="too many weights"),
    pytest.param(["data.weights=[0]"], "expected a number above 0", id="weight of nothing"),
    pytest.param(["data.split=1,x"], "expected up to three weights", id="no split"),
    pytest.param(["data.split='0,1,1'"], "nothing to train on", id="split without training"),
    pytest.param(["logger.log_dir=file"], "file is a file, expected a folder", id="log folder"),
    pytest.param(["logger.log_dir=link"], "is a broken link", id="log folder behind a link to nothing"),
    pytest.param(["checkpoint.save=file/in"], "file is a file, expected a folder", id="checkpoints below a file"),
    pytest.param(["data.cache_dir=file"], "file is a file, expected a folder", id="cache"),
    pytest.param(["checkpoint.pretrained_checkpoint=nope"], "nope: no such folder", id="no weights to begin with"),
    pytest.param(["logger.precision_every=-1"], "expected a number at least 0", id="negative interval"),
    pytest.param(["train.nonfinite=often"], "'rollback N'", id="what follows NaN"),
    pytest.param(["scheduler.lr_warmup_iters=10", "scheduler.lr_decay_iters=5"], "does not end before", id="schedule"),
]  # fmt: skip


VERBS = {"train": ["train"], "check": ["check"], "launch": LAUNCH}
CASES = [pytest.param(verb, *fault.values, id=f"{verb}: {fault.id}") for fault, verb in zip(FAULTS, itertools.cycle(VERBS), strict=False)]  # fmt: skip
"""Each fault in one verb; that all verbs ask the same is the next test's."""


@pytest.mark.parametrize(("verb", "settings", "said"), CASES)
def test_every_fault_is_refused_in_its_words(verb: str, settings: list[str], said: str, place: Path, cli) -> None:
    err = cli(*VERBS[verb], *settings, code=2)
    assert said in err
    assert len(err.splitlines()) == 2, err


def test_every_verb_says_all_faults_at_once_in_the_same_words(place: Path, cli) -> None:
    settings = ["data.split=x", "logger.precision_every=-1", "data.corpus=nope", "model.vocab_size=9", "logger.log_dir=file", "optimizer.lr=x"]  # fmt: skip
    said = set()
    for words in VERBS.values():
        said.add(cli(*words, *settings, code=2))
    assert len(said) == 1
    assert len(said.pop().splitlines()) == 7


def test_it_is_asked_without_torch(place: Path) -> None:
    asked = "assert main(['train', 'data.corpus=nope']) == main(['check', 'data.corpus=other.jsonl']) == 2"
    assert loaded_by(f"from mpbridge.cli.main import main\n{asked}", cwd=place) == []


def test_a_run_from_python_is_asked_the_same(place: Path) -> None:
    from mpbridge import ConfigContainer, pretrain
    from mpbridge.common.errors import Contradiction

    run = ConfigContainer.load("gpt_tiny", ["data.corpus=nope", "logger.log_dir=file"]).resolved()
    with pytest.raises(Contradiction) as found:
        pretrain(run, quiet=True)
    assert len(found.value.faults) == 2


def test_settings_without_effect_are_notes(place: Path, cli) -> None:
    out = " ".join(cli("check checkpoint.save_interval=5 checkpoint.accept=bf16").split())
    assert "checkpoint.save_interval: nothing is saved without checkpoint.save" in out
    assert "checkpoint.accept=bf16: nothing is resumed without checkpoint.load" in out
    assert "nothing is saved to go back to without checkpoint.save_interval" in " ".join(
        cli("check checkpoint.save=kept", "train.nonfinite=rollback 1").split()
    )
    cli("check train.timeout_minutes=0", code=2)


def test_what_only_this_machine_lacks_is_a_note_about_another(place: Path, cli) -> None:
    assert "note   on this machine: data.corpus=nope" in cli("check --target h100 data.corpus=nope")
    cli("check --target h100 model.vocab_size=9", code=2)


def test_check_says_what_training_would_still_need(place: Path, cli) -> None:
    model = "{num_layers: 1, hidden_size: 8, num_attention_heads: 1}"
    (place / "bare.yaml").write_text(f"model: {model}\ndata: {{seq_length: 8}}")
    out = cli("check --config bare.yaml --recipe bf16")
    assert "to train: train.train_iters is missing" in out
    assert "to train: optimizer.lr is missing" in out


def test_a_tracker_that_is_not_installed_is_a_note(place: Path, monkeypatch: pytest.MonkeyPatch, cli) -> None:
    monkeypatch.setattr("mpbridge.common.report.trackers.find_spec", lambda name: None)
    printed = cli("check", "logger.trackers=[jsonl, wandb]", "logger.log_dir=run")
    said = [line for line in printed.splitlines() if line.startswith("note")]
    assert said == [
        "note   tracker wandb: is not installed (pip install -e '.[wandb]' in a checkout of mpbridge); the run continues without it"
    ]
    assert "nothing is written without logger.log_dir" in cli("check", "logger.trackers=[tensorboard]")


def test_every_tracker_is_a_legal_word() -> None:
    from mpbridge.common.report.trackers import TRACKERS
    from mpbridge.settings.schema import settings

    words = {"tensorboard", "wandb", "mlflow", "jsonl"}
    assert set(settings("logger")["trackers"].choices) == {*TRACKERS, "jsonl"} == words


def test_a_package_that_is_not_installed_is_named(place: Path, monkeypatch: pytest.MonkeyPatch, cli) -> None:
    monkeypatch.setattr("mpbridge.training.data.look.find_spec", lambda name: None)
    assert "needs the package tokenizers" in cli("check data.tokenizer=tok data.end_of_text=a", code=2)
