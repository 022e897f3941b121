"""A conversion that is interrupted leaves nothing that looks whole, and the same command goes on where it was."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.training.serving import files
from mpbridge.training.serving.convert import to_folder
from tests.forked import Forked
from tests.training.serving import models

METHOD, RECIPE = "mxfp8", models.RECIPES["mxfp8"]
FILE_BYTES = 300_000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", FILE_BYTES)


@pytest.fixture
def whole(path: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an uninterrupted conversion writes."""
    return content(models.serve(path, tmp_path / "whole", METHOD, RECIPE))


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def convert(
    path: Path, target: Path, told: Callable[[int, int], None] = lambda done, total: None, recipe: str = RECIPE
) -> None:
    to_folder(path, target, method=METHOD, recipe=recipe, told=told)


def stopped(path: Path, target: Path) -> Path:
    """The folder of a conversion that Ctrl-C stopped in the middle."""
    with pytest.raises(KeyboardInterrupt, match=r"3 of its files are complete in .*, and the same command goes on"):
        convert(path, target, models.after(22, signal.SIGINT))
    assert not target.exists()
    partial_one = target.with_name(f".{target.name}.partial")
    assert not (partial_one / "config.json").exists()
    assert len(list(partial_one.glob("[!.]*.safetensors"))) == 3
    return partial_one


def test_an_interrupted_conversion_goes_on(path: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    assert len([name for name in whole if name.endswith(".safetensors")]) > 3
    before = {file.name: file.stat().st_ino for file in stopped(path, tmp_path / "out").glob("[!.]*.safetensors")}
    seen: list[int] = []
    convert(path, tmp_path / "out", lambda done, total: seen.append(done))
    assert content(tmp_path / "out") == whole
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in before} == before
    assert seen == sorted(seen)
    assert not (tmp_path / ".out.partial").exists()


def test_a_killed_conversion_goes_on(path: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    child = Forked(models.convert_and_stop, path, tmp_path / "out", METHOD, RECIPE, FILE_BYTES)
    try:
        assert child.wait() == -signal.SIGKILL, child.text
    finally:
        child.close()
    assert not (tmp_path / "out").exists()
    inodes = {file.name: file.stat().st_ino for file in (tmp_path / ".out.partial").glob("[!.]*.safetensors")}
    assert len(inodes) == 3
    convert(path, tmp_path / "out")
    assert content(tmp_path / "out") == whole
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in inodes} == inodes


def test_a_disk_that_is_full_keeps_what_is_complete(path: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    sizes = [len(data) for name, data in sorted(whole.items()) if name.endswith(".safetensors")]
    room = next(size for size in sizes[1:] if size > sizes[0]) - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(BadValue, match=r"out cannot be written: File too large \(\d of its files are complete"):
            convert(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "out").exists()
    convert(path, tmp_path / "out")
    assert content(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["a byte", "the end", "the journal", "no files", "another recipe"])
def test_only_files_of_the_same_bytes_are_kept(
    damage: str, path: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    partial_one = stopped(path, tmp_path / "out")
    file = min(partial_one.glob("[!.]*.safetensors"))
    data = file.read_bytes()
    (partial_one / "stranger.safetensors").write_bytes(data)
    if damage == "a byte":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "the end":
        file.write_bytes(data[:-1])
    elif damage == "the journal":
        (partial_one / "journal.json").write_text("[1")
    elif damage == "no files":
        journal = json.loads((partial_one / "journal.json").read_text())
        (partial_one / "journal.json").write_text(json.dumps({"identity": journal["identity"]}))
    if damage == "another recipe":
        (tmp_path / "own.yaml").write_text(f"extends: {RECIPE}\nfirst_last_layers_bf16: true\n")
        convert(path, tmp_path / "out", recipe=str(tmp_path / "own.yaml"))
        modules = json.loads((tmp_path / "out" / "contract.json").read_text())["modules"]
        assert {name.split(".")[2] for name in modules} == {"1"}
        return
    convert(path, tmp_path / "out")
    assert content(tmp_path / "out") == whole


def test_nothing_is_written_through_a_link_or_beside_another_process(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link, expected a folder"):
        convert(path, tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / ".two.partial").mkdir()
    child = Forked(models.hold, tmp_path / ".two.partial" / "lock")
    try:
        child.wait_for("held")
        with pytest.raises(BadValue, match="is being written by another process"):
            convert(path, tmp_path / "two")
    finally:
        child.close()


def test_the_command_says_how_to_go_on(path: Path, tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = files._write, [0]

    def stopping(handle: int, data: bytes, at: int) -> None:
        write(handle, data, at)
        seen[0] += 1
        if seen[0] == 25:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(files, "_write", stopping)
    command = ["convert", f"ckpt:{path}", f"hf:{tmp_path / 'out'}", "--quantization", METHOD, "--recipe", RECIPE]
    assert "the same command goes on from there" in cli(*command, code=130, error=True)
    cli(*command)
    cli("contract", tmp_path / "out", "--run", path, "--recipe", RECIPE)


@pytest.mark.parametrize("error", [None, Refused("no")], ids=["written", "refused"])
def test_the_lock_is_held_until_the_files_beside_are_gone(error: Exception | None, tmp_path: Path) -> None:
    left: list[list[str]] = []
    shards = files.Shards(tmp_path, files.planned([("a", "F32", (2,))]), "x", lambda done, total: None)
    own, shards._lock = shards._lock, SimpleNamespace(close=lambda: left.append(os.listdir(tmp_path)))  # type: ignore[assignment]
    with own, suppress(Refused), shards:
        shards.put("a", torch.ones(2))
        if error:
            raise error
    assert left == [[] if error else ["model.safetensors"]]
