"""Reads a checkpoint's contents by its index: elements directly from their bytes, objects as JSON. Unpickles nothing: a checkpoint with pickles is first converted to data by
an isolated process, and read like any other. Then what a load really loaded: the engine's state, exported again, against what it was given, and its mean second moment.

The process (converter_process.py) gets only two paths: no environment, no open files, no standard input, no framework; it may read the checkpoint and
write one folder, which Linux enforces where available (Landlock); and it ends with its parent.

Adam's second moment cannot fall faster than by beta2 a step (v' = beta2 v + (1 - beta2) g^2, and g^2 is never negative), so states that were lost on the way
from the file to the optimizer show in one number, whatever the loss does.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from mpbridge.backend.devices.collectives import summed
from mpbridge.backend.megatron import sharded
from mpbridge.common.errors import CheckpointError
from mpbridge.common.facts import least_left
from mpbridge.common.files import opened, parsed
from mpbridge.numerics.observation.tensors import digest, plain_moment
from mpbridge.observe.audit.between import resting
from mpbridge.precision.globs import is_adapter
from mpbridge.training.checkpoint import extra_state, store
from mpbridge.training.checkpoint.continuation import read_state
from mpbridge.training.checkpoint.extra_state import SUFFIX
from mpbridge.training.checkpoint.format import METADATA, Index, StoredPiece, StoredTensor, decoded, read_index
from mpbridge.training.checkpoint.verdict import FILE


class Contents(ExitStack):
    """An open checkpoint; a context manager that closes its files. Raises CheckpointError for an invalid index or state."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.manifest = store.read_manifest(folder)
        self.step = store.step_in(self.manifest, folder)
        self.index: Index = read_index(folder, self.manifest["files"])
        self.delayed_format: str | None = None
        """`extra_state.format_of` the run that takes the states up."""
        self.adapters_begin = False
        """Whether adapters that the checkpoint does not have stay as they are initialised."""
        self._open: dict[str, IO[bytes]] = {}

    def common(self) -> Mapping[str, Any]:
        """The state that is equal on all ranks."""
        return read_state(self.folder)

    def load(self, tree: Any) -> Any:
        """Fills a state of sharded parts: tensors are read into the memory that they name, in its dtype.

        Raises CheckpointError for a missing part, or one with another shape.
        """
        return sharded.filled(tree, lambda leaf: self.tensor(leaf) if sharded.is_tensor(leaf) else self.object(leaf))

    def object(self, leaf: Any) -> Any:
        """The object with that key and position."""
        found, extra = self.index.objects.get(leaf.unique_key), extra_state.is_extra(leaf.unique_key)
        if found is None and extra:
            return leaf.data  # the saved run was not quantized by Transformer Engine: histories start empty
        if found is None:
            raise CheckpointError(f"{self.folder} has no {leaf.unique_key}")
        name, at, size = found
        stream = self._stream(name)
        stream.seek(at)
        what = f"{self.folder / name}: {leaf.unique_key}"
        try:
            value = decoded(parsed(stream.read(size), what))
            return extra_state.as_module(value, leaf.data, format=self.delayed_format) if extra else value
        except CheckpointError as error:
            raise CheckpointError(f"{what} is refused: {error}") from error

    def tensor(self, leaf: Any) -> torch.Tensor:
        """A ShardedTensor's part of its tensor."""
        stored = self.index.tensors.get(leaf.key)
        if stored is None and self.adapters_begin and is_adapter(leaf.key):
            return leaf.data  # type: ignore[no-any-return]
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {leaf.key}")
        data = sharded.wide(leaf)
        if data is None:
            data = torch.empty(leaf.local_shape, dtype=leaf.dtype)
        target: torch.Tensor = data.detach()
        if stored.shape != tuple(leaf.global_shape):
            if not leaf.allow_shape_mismatch:
                raise CheckpointError(f"{leaf.key} has shape {list(stored.shape)}, expected {list(leaf.global_shape)}")
            target.zero_()
        shape = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
        whole = target.view(shape) if target.is_contiguous() else target.reshape(shape)
        read = sum(self._copy(piece, stored, whole, tuple(leaf.global_offset)) for piece in stored.pieces)
        if read != target.numel() and stored.shape == tuple(leaf.global_shape):
            raise CheckpointError(f"{leaf.key} has {read} elements, expected {target.numel()}")
        if whole.data_ptr() != target.data_ptr():  # reshape had to copy
            target.copy_(whole.view(target.shape))
        return target

    def _copy(self, piece: StoredPiece, stored: StoredTensor, target: torch.Tensor, offset: tuple[int, ...]) -> int:
        """Reads the intersection of a piece and a wanted block (its first element at `offset`); returns the number of elements."""
        lows = [max(a, b) for a, b in zip(piece.offset, offset, strict=True)]
        highs = [
            min(a + m, b + n)
            for a, m, b, n in zip(piece.offset, piece.shape, offset, target.shape, strict=True)
        ]  # fmt: skip
        common = [high - low for low, high in zip(lows, highs, strict=True)]
        if any(side <= 0 for side in common):
            return 0
        strides = [math.prod(piece.shape[axis + 1 :]) for axis in range(len(common))]
        first = sum((low - a) * stride for low, a, stride in zip(lows, piece.offset, strides, strict=True))
        span = 1 + sum((side - 1) * stride for side, stride in zip(common, strides, strict=True))
        place = tuple(slice(low - b, low - b + side) for low, b, side in zip(lows, offset, common, strict=True))
        part, dtype = target[place], getattr(torch, stored.dtype)
        at, count = piece.at + first * dtype.itemsize, math.prod(common)
        if span == count and part.dtype is dtype and part.device.type == "cpu" and part.is_contiguous():
            self._read(piece.file, at, part)
        else:
            row = torch.empty(span, dtype=dtype)
            self._read(piece.file, at, row)
            part.copy_(row.as_strided(common, strides))
        return count

    def _read(self, name: str, at: int, into: torch.Tensor) -> None:
        stream, room = self._stream(name), memoryview(into.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        stream.seek(at)
        if stream.readinto(room) != room.nbytes:  # type: ignore[attr-defined]
            raise CheckpointError(f"{self.folder / name} is truncated: {room.nbytes} bytes at {at} are missing")

    def _stream(self, name: str) -> IO[bytes]:
        if name not in self._open:
            try:
                self._open[name] = self.enter_context(opened(self.folder / name))
            except OSError as error:
                raise CheckpointError(f"{self.folder / name}: {os.strerror(error.errno or 0)}") from error
        return self._open[name]


_ROOT = Path(__file__).resolve().parents[3]
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import mpbridge.training.checkpoint.converter_process as process; process.main()"


def is_foreign(path: Path) -> bool:
    """Whether a folder is a checkpoint in megatron-core's format that mpbridge did not write."""
    return not (path / store.MANIFEST).exists() and (path / METADATA).exists()


def needs_converting(path: Path) -> bool:
    """Whether a checkpoint must be converted before loading. Raises CheckpointError."""
    return is_foreign(path) or store.read_manifest(path)["schema"] == store.CONVERTIBLE


def converted(path: Path, room: Path) -> Path:
    """Converts the checkpoint in `path` to a sealed new folder in `room`. Raises CheckpointError naming the file that cannot be converted."""
    foreign = is_foreign(path)
    step = 0 if foreign else store.step_in(store.check(path), path)
    partial = store.begin(room, step)
    try:
        _run(path.resolve(), partial.resolve(), "foreign" if foreign else "ours")
        if not foreign:
            with opened(path / FILE) as stream, (partial / FILE).open("xb") as out:
                shutil.copyfileobj(stream, out)
        return store.seal(partial, step, foreign=foreign)
    except BaseException:
        store.discard(partial)
        raise


def _run(source: Path, out: Path, whose: str) -> None:
    command = [sys.executable, "-I", "-B", "-W", "ignore", "-c", _START, str(_ROOT), str(source), str(out), whose]
    nothing, kept = subprocess.DEVNULL, subprocess.PIPE
    done = subprocess.run(
        command, env={}, cwd="/", stdin=nothing, stdout=nothing, stderr=kept, start_new_session=True, check=False
    )
    if code := done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == 1 and text:
            raise CheckpointError(text.splitlines()[-1][:2000])
        # a process that was killed or failed unexpectedly has no message of its own
        raise CheckpointError(f"{source} cannot be converted: the conversion process ended with {ended} {text[-500:]}")


Digests = dict[str, tuple[torch.dtype, tuple[int, ...], int]]
"""Place in the state -> dtype, shape and digest of its tensor."""


def digests(tree: Any) -> Digests:
    """Of every tensor in a state, loaded or exported (megatron-core's sharded tensors have theirs in `data`)."""
    return {place: (one.dtype, tuple(one.shape), digest(one)) for place, one in _tensors(tree, "")}


def different(given: Digests, engine: Any) -> list[str]:
    """The places whose tensor the engine no longer has as it was given; places of another dtype or shape there (a state that is stored in its own way) are
    not compared. Collective where an export is."""
    now = digests(engine.state())
    return [place for place, was in given.items() if place in now and now[place][:2] == was[:2] and now[place] != was]


def _tensors(tree: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    inner = tree if isinstance(tree, torch.Tensor) else getattr(tree, "data", None)
    if isinstance(inner, torch.Tensor):
        if not place.endswith(SUFFIX):
            yield place, inner
        return
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for name, part in parts:
        yield from _tensors(part, f"{place}.{name}" if place else str(name))


LOST = 0.5
"""Share of what must be left at least below which states are called lost. Parameters that several ranks hold count once on each: on another layout the
mean is another by a few percent."""


def mean_second(engine: Any) -> float | None:
    """Mean of all second moments on all ranks; None where there are none, or none that can be read as they are. Every rank calls it."""
    total, count, coded = 0.0, 0.0, 0.0
    for one in resting(engine):
        if one.role == "exp_avg_sq":
            values = plain_moment(one.tensor)
            if values is None:
                coded += 1
            else:
                total += float(values.sum(dtype=torch.float64))
                count += values.numel()
    total, count, coded = summed((total, count, coded))
    return total / count if count and not coded and math.isfinite(total) else None


def lost(saved: float | None, found: float | None, beta2: float) -> str:
    """A sentence where less is found after one step than a step leaves of what was saved; '' where not, or where either is unknown."""
    left = least_left(beta2)
    if saved is None or found is None or not 0 < saved < math.inf or found >= LOST * left * saved:
        return ""
    return (
        f"the optimizer's second moments are {found / saved:.2g} times those of the checkpoint (mean {found:.3g}, saved {saved:.3g}), and one step reduces "
        f"them to no less than {left:g} times: states were lost between the file and the first step"
    )
