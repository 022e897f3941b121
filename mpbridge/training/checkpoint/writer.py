"""Writes one rank's part of a checkpoint: in this process, or in one forked child while training continues.

Each tensor is a small `torch.save` archive, so that torch's and megatron-core's own tools can read the file through `.metadata`
and `common.pt`, which mpbridge never reads. mpbridge's index points to the raw elements inside it, and mpbridge's loads read nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from mpbridge.backend.megatron import sharded
from mpbridge.common.files import read_json
from mpbridge.training.checkpoint import extra_state
from mpbridge.training.checkpoint.archive import members
from mpbridge.training.checkpoint.format import COMMON, METADATA, Index, encoded

ALIGN = 64
CONFIG = "metadata.json"
"""File with the name of megatron-core's format."""


def data_file(rank: int) -> str:
    """Name of a rank's data file, as in torch and megatron-core."""
    return f"__{rank}_0.distcp"


def part_file(rank: int) -> str:
    """Name of the file with a rank's part of the index, which is removed when the checkpoint is sealed."""
    return f".index-{rank:05d}.json"


@dataclass(slots=True)
class Load:
    """What one rank writes: CPU tensors with their positions; objects as JSON."""

    tensors: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]] = field(default_factory=list)
    """(key, global shape, offset, contiguous elements with the global number of axes)."""
    empty: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Key -> dtype and global shape of tensors without elements."""
    objects: dict[str, bytes] = field(default_factory=dict)


def staged(tree: Any) -> Load:
    """This rank's part of a state, copied from the GPU; CPU tensors are not copied. Raises CheckpointError for objects that are not data."""
    load = Load()
    for leaf in sharded.entries(tree):
        if not sharded.is_written_here(leaf):
            continue
        if sharded.is_object(leaf):
            data = extra_state.as_data(leaf.data) if extra_state.is_extra(leaf.unique_key) else leaf.data
            load.objects[leaf.unique_key] = json.dumps(encoded(data), separators=(",", ":")).encode()
            continue
        data = sharded.wide(leaf).detach()
        data = data.cpu().contiguous().view((1,) * leaf.prepend_axis_num + tuple(leaf.local_shape))
        if data.numel():
            load.tensors.append((leaf.key, tuple(leaf.global_shape), tuple(leaf.global_offset), data))
        elif not math.prod(leaf.global_shape):
            load.empty[leaf.key] = (_name(data.dtype), tuple(leaf.global_shape))
    return load


def write(folder: Path, rank: int, load: Load) -> None:
    """Writes a rank's data file, flushed to the disk, and its part of the index. Raises OSError."""
    part: dict[str, Any] = {"tensors": {}, "objects": {}}
    with (folder / data_file(rank)).open("x+b") as stream:
        out = _Summed(stream)
        for key, shape, offset, data in load.tensors:
            start = out.aligned()
            try:
                torch.save(_own_storage(data), cast("IO[bytes]", out))
            except RuntimeError as error:
                # behind a write that failed torch 2.6 closes its archive, which fails in other words
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
            at, found = members(stream, start, out.tell())["data/0"]
            assert found == data.numel() * data.element_size()
            stream.seek(out.tell())
            entry = part["tensors"].setdefault(key, {"dtype": _name(data.dtype), "shape": list(shape), "pieces": []})
            entry["pieces"].append([at, list(offset), list(data.shape), start, out.tell() - start])
        for key, raw in load.objects.items():
            part["objects"][key] = [out.tell(), len(raw)]
            out.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    for key, (dtype, shape) in load.empty.items():
        part["tensors"][key] = {"dtype": dtype, "shape": list(shape), "pieces": []}
    part |= {"file": data_file(rank), "bytes": out.tell(), "sha256": out.digest.hexdigest()}
    (folder / part_file(rank)).write_text(json.dumps(part, separators=(",", ":")), encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_storage(data: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of exactly its size, since torch.save writes whole storages."""
    if data.untyped_storage().nbytes() == data.numel() * data.element_size():
        return data
    raw = data.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(raw, dtype=data.dtype).view(data.shape)


class _Summed(io.RawIOBase):
    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest, self.at = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.stream.write(data)
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.at += size
        return size

    def tell(self) -> int:
        return self.at

    def aligned(self) -> int:
        """Writes zeros up to the next multiple of ALIGN, and returns that position."""
        self.write(bytes(-self.at % ALIGN))
        return self.at


class RankWrite:
    """A rank's `write`: at once, or in a forked child, which sees the tensors as they were at the fork."""

    def __init__(self, folder: Path, rank: int, load: Load, *, background: bool) -> None:
        self._process: Any = None
        if not background:
            self._said = attempted(folder, rank, load)
            return
        context = multiprocessing.get_context("fork")
        self._receive, send = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(folder, rank, load, send), daemon=True)
        self._process.start()
        send.close()

    def done(self) -> bool:
        """Whether this rank's files are written, or the writer is dead."""
        return self._process is None or self._receive.poll() or not self._process.is_alive()

    def finish(self) -> str:
        """Waits; returns '' if the files are written, else the error."""
        if self._process is not None:
            try:
                self._said = self._receive.recv_bytes().decode()
            except EOFError:
                self._process.join()
                self._said = f"the process that wrote the checkpoint died (exit code {self._process.exitcode})"
            self._end()
        return self._said

    def abort(self) -> None:
        """Ends the child; its files have no final name yet, so they are not taken for a checkpoint."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _end(self) -> None:
        self._process.join()
        self._process.close()
        self._receive.close()
        self._process = None


def _child(folder: Path, rank: int, load: Load, send: Any) -> None:
    # the run's own signal handlers would save again, and a killed run must not leave a writer behind
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)  # the parent's thread pool does not exist in the child
    send.send_bytes(attempted(folder, rank, load).encode())
    send.close()


def attempted(folder: Path, rank: int, load: Load) -> str:
    """`write`; returns '' on success, else the error."""
    try:
        write(folder, rank, load)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def end_with_parent(number: int) -> None:
    """Asks the kernel to signal this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))


# --- the whole checkpoint, on rank 0 --------------------------------------------------------------------------------------------------------
def indexed(partial: Path, ranks: int) -> dict[str, Any]:
    """Merges the ranks' parts into one index (and one for other tools); returns size and checksum of each data file. Raises CheckpointError."""
    parts = [read_json(partial / part_file(rank)) for rank in range(ranks)]
    index = Index()
    for part in parts:
        file = part["file"]
        for key, entry in part["tensors"].items():
            index.add(key, entry["dtype"], entry["shape"], *((file, *piece[:3]) for piece in entry["pieces"]))
        index.objects.update({key: (file, at, size) for key, (at, size) in part["objects"].items()})
    index.write(partial, "the ranks' shards do not make up the whole state")
    _write_metadata(partial, parts)
    for rank in range(ranks):
        (partial / part_file(rank)).unlink()
    return {part["file"]: {"bytes": part["bytes"], "sha256": part["sha256"]} for part in parts}


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """`common.pt`, which megatron-core loads first, and the name of the format."""
    torch.save(dict(common), folder / COMMON)
    names: dict[str, Any] = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    names |= {"sharded_backend_version": 1, "common_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(names), encoding="utf-8")


def _write_metadata(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """`.metadata`, from the ranks' parts of the index, which name the archive around each tensor's elements."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for part in parts:
        for key, entry in part["tensors"].items():
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            known = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(entry["shape"]), []))
            for _, offset, shape, start, length in entry["pieces"]:
                where = torch.Size(offset)
                # torch finds a piece by tensor, offset and its position in this list
                places[MetadataIndex(key, where, len(known.chunks))] = _StorageInfo(part["file"], start, length)
                known.chunks.append(ChunkStorageMetadata(where, torch.Size(shape)))
    with (folder / METADATA).open("wb") as stream:
        pickle.dump(Metadata(state_dict_metadata=tensors, planner_data={}, storage_data=places), stream)
