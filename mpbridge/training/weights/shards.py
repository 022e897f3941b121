"""The safetensors files of an export. Their layout is known before anything is read: tensors are written in place, one parameter at a time, and a file that is complete is not written again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mpbridge.common.errors import BadValue, CheckpointError
from mpbridge.common.files import Locked, ProgressCallback, lock, read_json
from mpbridge.settings.huggingface.folder import BYTES, INDEX, SINGLE, FolderTensor, header
from mpbridge.training.checkpoint.store import write_whole
from mpbridge.training.weights.source import FolderReader

FILE_BYTES = 5_000_000_000
"""Maximum size of a safetensors file in bytes, as in transformers."""
JOURNAL, LOCK = "journal.json", "lock"
"""Beside the files until the folder is complete: what was written of which export, and a lock against a second process."""


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape and SHA-256 of a tensor's bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(_bytes(tensor)).hexdigest()}


def planned(sizes: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, FolderTensor]:
    """Tensor -> its place. sizes: (name, dtype in safetensors' spelling, shape) in the order of writing."""
    files: list[dict[str, FolderTensor]] = []
    size = 0
    for name, dtype, shape in sizes:
        one = FolderTensor("", dtype, shape)
        if not files or (size + one.bytes > FILE_BYTES and size):
            files.append({})
            size = 0
        files[-1][name], size = one, size + one.bytes
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    return {
        name: FolderTensor(file, one.dtype, one.shape)
        for file, held in zip(names if len(files) > 1 else [SINGLE], files, strict=False)
        for name, one in held.items()
    }


class Shards:
    """The files of `plan` in a folder that is not yet complete; a context manager.

    identity: of what the bytes are made of. Files of an earlier, interrupted export with the same identity are kept if every tensor has its SHA-256. Raises BadValue if another
    process writes there, CheckpointError for a link.
    """

    def __init__(self, folder: Path, plan: Mapping[str, FolderTensor], identity: str, told: ProgressCallback) -> None:
        self.folder, self.plan, self._identity, self._told = folder, plan, identity, told
        self.facts: dict[str, dict[str, Any]] = {}
        """Tensor -> dtype, shape and SHA-256 of its bytes, of everything written so far."""
        self.total, self._done = sum(one.bytes for one in plan.values()), 0
        self.files = list(dict.fromkeys(one.file for one in plan.values()))
        self._complete: list[str] = []
        self._open: dict[str, tuple[int, dict[str, int]]] = {}
        try:
            self._lock = lock(folder / LOCK, wait=False)
        except Locked:
            raise BadValue(
                f"{folder} is being written by another process: wait for it, or choose another name"
            ) from None

    def __enter__(self) -> Self:
        journal = self._journal()
        for entry in self.folder.iterdir():
            link = entry.is_symlink()
            if entry.name in (LOCK, JOURNAL) or (
                entry.name in journal and not link and self._holds(entry.name, journal)
            ):
                continue
            shutil.rmtree(entry) if entry.is_dir() and not link else entry.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle, _ in self._open.values():
            os.close(handle)
        self._lock.close()
        if error is None:
            for name in (LOCK, JOURNAL):
                (self.folder / name).unlink(missing_ok=True)

    def wants(self, names: Iterable[str]) -> bool:
        """Whether one of the tensors has not been written."""
        return any(name not in self.facts for name in names)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor to its place, and completes its file with the last one. Raises OSError."""
        if name in self.facts:
            return
        one = self.plan[name]
        facts = facts_of(tensor)
        handle, places = self._open.get(one.file) or self._begin(one.file)
        _write(handle, _bytes(tensor), places.pop(name))
        self.facts[name], self._done = facts, self._done + one.bytes
        self._told(self._done, self.total)
        if not places:
            os.fsync(handle)
            os.close(self._open.pop(one.file)[0])
            (self.folder / f".{one.file}").rename(self.folder / one.file)
            self._complete.append(one.file)
            files = {file: {at: self.facts[at] for at in self._of(file)} for file in self._complete}
            write_whole(self.folder / JOURNAL, json.dumps({"identity": self._identity, "files": files}))

    def index(self) -> None:
        """Writes the list of tensors, if there are several files."""
        if len(self.files) > 1:
            places = {name: one.file for name, one in sorted(self.plan.items())}
            text = json.dumps({"metadata": {"total_size": self.total}, "weight_map": places}, indent=2)
            (self.folder / INDEX).write_text(text + "\n", encoding="utf-8")

    def _of(self, file: str) -> list[str]:
        """Tensors of a file in the order of its bytes: wide dtypes first, so that every tensor is aligned."""
        held = [name for name, one in self.plan.items() if one.file == file]
        return sorted(held, key=lambda name: -BYTES[self.plan[name].dtype])

    def _begin(self, file: str) -> tuple[int, dict[str, int]]:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for name in self._of(file):
            one = self.plan[name]
            entries[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.bytes]}
            starts[name], at = at, at + one.bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(self.folder / f".{file}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        places = {name: 8 + len(text) + start for name, start in starts.items()}
        self._open[file] = handle, places
        _write(handle, len(text).to_bytes(8, "little") + text, 0)
        return handle, places

    def _journal(self) -> dict[str, Any]:
        """File -> tensor -> facts of what an earlier process completed of the same export."""
        with suppress(CheckpointError, OSError):
            found = read_json(self.folder / JOURNAL)
            if isinstance(found, dict) and found.get("identity") == self._identity:
                return dict(found["files"])
        return {}

    def _holds(self, file: str, journal: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a file of the journal is what it was; its tensors are then written."""
        held = {name: one for name, one in self.plan.items() if one.file == file}
        try:
            if header(self.folder, file) != held:
                return False
            with FolderReader(self.folder, held, {}) as reader:
                facts = {name: facts_of(reader.raw(name)) for name in held}
        except (BadValue, OSError):
            return False
        if facts != journal[file]:
            return False
        self.facts |= facts
        self._complete.append(file)
        self._done += sum(one.bytes for one in held.values())
        self._told(self._done, self.total)
        return True


def _bytes(tensor: torch.Tensor) -> memoryview:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type]


def _write(handle: int, data: bytes | memoryview, at: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, at)
        rest, at = rest[count:], at + count
