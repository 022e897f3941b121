"""Converts a folder in Hugging Face's layout to a checkpoint: parameters are assembled one by one and written under all names that engines look for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError
from mpbridge.common.files import ProgressCallback, folder_for
from mpbridge.settings.huggingface.folder import PREFIX, read_config, tensors
from mpbridge.settings.huggingface.section import family_of
from mpbridge.settings.huggingface.tensors import Mapped, copies, mapped
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.index import INDEX, STATE, Index, StoredPiece, StoredTensor, read_index
from mpbridge.training.checkpoint.io import CONFIG
from mpbridge.training.checkpoint.json_codec import encoded
from mpbridge.training.checkpoint.weights_only import SOURCE
from mpbridge.training.checkpoint.writer import Load, indexed, write, write_common
from mpbridge.training.weights.layouts import joined
from mpbridge.training.weights.source import FolderReader, check

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

SCHEMA = 1
FILE_BYTES = 8 << 30
"""Approximate size of a data file, in bytes."""


@dataclass(slots=True)
class Taken:
    """The result of a conversion."""

    path: Path
    tensors: int = 0
    """Number of tensors in the folder."""
    elements: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    """torch's name of a parameter's dtype in the checkpoint -> elements."""
    widened: int = 0
    """Number of tensors that were FP8."""
    rounded: int = 0
    """Number of their elements whose product of code and scale the dtype cannot represent exactly."""


def to_checkpoint(source: Path, folder: Path, run: Run, told: ProgressCallback = lambda done, total: None) -> Taken:
    """Writes the weights of `source` as step 0 of `folder`. run: the folder's configuration, resolved.

    Raises Contradiction for weights that do not match config.json's model, before anything is written; BadValue for a folder without weights;
    CheckpointError if `folder` already contains checkpoints or cannot be written.
    """
    config, held = read_config(source), tensors(source)
    if not held:
        raise BadValue(f"{source} has no weights: expected safetensors files")
    if store.saved(folder):
        raise CheckpointError(f"{folder} already contains {store.saved(folder)[0].path.name}: choose another folder")
    wanted = list(mapped(family_of(config), run.facts.shape, run.inputs["model"]))
    copied = {name: of for name, of in copies(run.facts.shape).items() if name in held}
    with FolderReader(source, held, config) as reader:
        check(held, wanted, copied, reader.block)
        _check_copies(reader, copied)
        try:
            with folder_for(folder):
                partial = store.begin(folder, 0)
                try:
                    return _written(partial, wanted, reader, run, told, config, copied)
                except BaseException:
                    store.discard(partial)
                    raise
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def _written(
    partial: Path,
    wanted: list[Mapped],
    reader: FolderReader,
    run: Run,
    told: ProgressCallback,
    config: Mapping[str, Any],
    copied: Mapping[str, str],
) -> Taken:
    taken = Taken(path=partial, tensors=len(reader.held))
    dtypes = _dtypes(wanted, reader)
    total = sum(one.elements * dtypes[one.places[0].key].itemsize for one in wanted)
    stream = _Stream(wanted, reader, run, dtypes, taken, lambda done: told(done, total))
    files = 0
    while stream.left:
        write(partial, files, Load(tensors=stream))  # type: ignore[arg-type]
        files += 1
    write_common(partial, {})
    known = indexed(partial, files)
    _add_places(partial, wanted, known)
    (partial / STATE).write_text(json.dumps(encoded({})), encoding="utf-8")
    (partial / CONFIG).write_text(run.container.to_yaml(), encoding="utf-8")
    (partial / SOURCE).write_text(
        json.dumps(_origin(reader, dtypes, wanted, config, copied), indent=1), encoding="utf-8"
    )
    taken.path = store.seal(partial, 0, known=known, foreign=True)
    return taken


class _Stream:
    """The input of `writer.write`, one file after the other: parameters are made when they are needed."""

    def __init__(
        self,
        wanted: list[Mapped],
        reader: FolderReader,
        run: Run,
        dtypes: Mapping[str, torch.dtype],
        taken: Taken,
        told: Callable[[int], None],
    ) -> None:
        self.left, self.reader, self.shape = list(reversed(wanted)), reader, run.facts.shape
        self.dtypes, self.taken, self.told, self.done = dtypes, taken, told, 0

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        stop = self.done + FILE_BYTES
        while self.left and self.done < stop:
            one = self.left.pop()
            data, place = self._made(one), one.places[0]
            self.done += data.numel() * data.element_size()
            self.taken.elements += data.numel()
            name = str(data.dtype).removeprefix("torch.")
            self.taken.dtypes[name] = self.taken.dtypes.get(name, 0) + data.numel()
            yield (
                place.key,
                (*place.counts, *one.shape),
                (*place.index, *(0 for _ in one.shape)),
                data.view((1,) * len(place.counts) + one.shape),
            )
            self.told(self.done)

    def _made(self, one: Mapped) -> torch.Tensor:
        parts = []
        for name, _ in one.parts:
            part = self.reader.tensor(name, wide=True)
            if self.reader.is_quantized(name):
                self.taken.widened += 1
                self.taken.rounded += int((part.to(self.dtypes[one.places[0].key]).float() != part).sum())
            parts.append(part)
        return joined(parts, one.layout, self.shape).to(self.dtypes[one.places[0].key]).contiguous()


def _dtypes(wanted: list[Mapped], reader: FolderReader) -> dict[str, torch.dtype]:
    """Key -> the dtype of everything stored under it: the widest of its parts' dtypes, which can represent all values."""
    found: dict[str, torch.dtype] = {}
    for one in wanted:
        kinds = [reader.dtype_of(name) for name, _ in one.parts] + ([torch.float32] if one.wide else [])
        for kind in kinds:
            before = found.get(one.places[0].key, kind)
            found[one.places[0].key] = torch.promote_types(before, kind)
    return found


def _add_places(partial: Path, wanted: list[Mapped], known: Mapping[str, Any]) -> None:
    """Adds every parameter's other names to the index: the same bytes under another key."""
    index = read_index(partial, known)
    at = {(key, piece.offset): (stored, piece) for key, stored in index.tensors.items() for piece in stored.pieces}
    pieces: dict[str, list[StoredPiece]] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in wanted:
        first, zeros = one.places[0], (0,) * len(one.shape)
        stored, piece = at[first.key, (*first.index, *zeros)]
        for place in one.places[1:]:
            shapes[place.key] = (stored.dtype, (*place.counts, *one.shape))
            whole = (1,) * len(place.counts) + one.shape
            pieces.setdefault(place.key, []).append(StoredPiece(piece.file, piece.at, (*place.index, *zeros), whole))
    others = {key: StoredTensor(*shapes[key], tuple(found)) for key, found in pieces.items()}
    merged = Index({**others, **index.tensors}, index.objects)
    if faults := merged.incomplete():
        raise CheckpointError("; ".join(faults[:5]))
    (partial / INDEX).write_text(json.dumps(merged.as_data(), separators=(",", ":")), encoding="utf-8")


def _origin(
    reader: FolderReader,
    dtypes: Mapping[str, torch.dtype],
    wanted: list[Mapped],
    config: Mapping[str, Any],
    copied: Mapping[str, str],
) -> dict[str, Any]:
    narrow = {
        name: str(reader.dtype_of(name)).removeprefix("torch.")
        for one in wanted
        for name, _ in one.parts
        if reader.dtype_of(name) is not dtypes[one.places[0].key]
    }
    quantized = sorted(name for name in reader.held if reader.is_quantized(name))
    return {
        "schema": SCHEMA,
        "layout": PREFIX.rstrip(":"),
        "config": dict(config),
        "narrower": narrow,
        "copies": sorted(copied),
        "widened": len(quantized),
    }


def _check_copies(reader: FolderReader, copied: Mapping[str, str]) -> None:
    """Raises BadValue if the two copies of a repeated tensor differ: the model has room for only one."""
    for name, original in copied.items():
        if not torch.equal(reader.tensor(name), reader.tensor(original)):
            raise BadValue(
                f"{name} differs from {original}: megatron-core's model has one tensor for both, so they must be equal"
            )
