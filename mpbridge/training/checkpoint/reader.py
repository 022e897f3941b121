"""Reads a checkpoint's contents by its index: elements directly from their bytes, objects as JSON. Unpickles nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from mpbridge.backend.megatron import sharded
from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import opened, parsed
from mpbridge.precision.globs import is_adapter
from mpbridge.training.checkpoint import extra_state, store
from mpbridge.training.checkpoint.continuation import read_state
from mpbridge.training.checkpoint.index import Index, StoredPiece, StoredTensor, read_index
from mpbridge.training.checkpoint.json_codec import decoded


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
