"""Converts between a checkpoint and a folder in Hugging Face's layout. To a checkpoint: parameters are assembled one by one and written under all names that engines look for.
To a folder: they are split one by one and written in files of a few gigabytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError, MpbridgeError, Refused
from mpbridge.common.files import ProgressCallback, folder_for, folder_inside, read_json
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.huggingface import folder as layout
from mpbridge.settings.huggingface.folder import PREFIX, read_config, tensors
from mpbridge.settings.huggingface.section import family_of
from mpbridge.settings.huggingface.tensors import ADAPTERS, Mapped, copies, mapped
from mpbridge.settings.huggingface.written import config_json, refuse_differences
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.continuation import SOURCE
from mpbridge.training.checkpoint.format import STATE, encoded, read_index
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.store import CONFIG
from mpbridge.training.checkpoint.writer import Load, indexed, write, write_common
from mpbridge.training.serving.cast import Served
from mpbridge.training.serving.export import Export, Given
from mpbridge.training.serving.files import FolderReader, check, joined
from mpbridge.training.serving.merge import Merge, write_alone

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
    with FolderReader(source, held, config) as reader:
        conversion = _Conversion(reader, run, told)
        try:
            with folder_for(folder):
                partial = store.begin(folder, 0)
                try:
                    return conversion.write(partial)
                except BaseException:
                    store.discard(partial)
                    raise
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


class _Conversion:
    """The input of `writer.write`, one file after the other: parameters are made when they are needed. Raises what `to_checkpoint` raises for the weights."""

    def __init__(self, reader: FolderReader, run: Run, told: ProgressCallback) -> None:
        self.reader, self.run, self.told, self.shape = reader, run, told, run.facts.shape
        family = family_of(reader.config)
        self.wanted = list(mapped(family, self.shape, run.inputs["model"]))
        self.copied = {name: of for name, of in copies(family, self.shape).items() if name in reader.held}
        check(reader.held, self.wanted, self.copied, reader.block)
        for name, original in self.copied.items():
            if not torch.equal(reader.tensor(name), reader.tensor(original)):
                raise BadValue(
                    f"{name} differs from {original}: megatron-core's model has one tensor for both, so they must be equal"
                )
        self.dtypes: dict[str, torch.dtype] = {}
        """Key -> the dtype of everything stored under it: the widest of its parts' dtypes, which can represent all values."""
        for one in self.wanted:
            for kind in [reader.dtype_of(name) for name, _ in one.parts] + ([torch.float32] if one.wide else []):
                before = self.dtypes.get(one.places[0].key, kind)
                self.dtypes[one.places[0].key] = torch.promote_types(before, kind)
        self.total = sum(one.elements * self.dtypes[one.places[0].key].itemsize for one in self.wanted)
        self.taken = Taken(path=reader.folder, tensors=len(reader.held))
        self.left, self.done = self.wanted[::-1], 0

    def write(self, partial: Path) -> Taken:
        """Writes all files of the checkpoint, and seals it."""
        files = 0
        while self.left:
            write(partial, files, Load(tensors=self))  # type: ignore[arg-type]
            files += 1
        write_common(partial, {})
        known = indexed(partial, files)
        _add_places(partial, self.wanted, known)
        (partial / STATE).write_text(json.dumps(encoded({})), encoding="utf-8")
        (partial / CONFIG).write_text(self.run.container.to_yaml(), encoding="utf-8")
        (partial / SOURCE).write_text(json.dumps(self._origin(), indent=1), encoding="utf-8")
        self.taken.path = store.seal(partial, 0, known=known, foreign=True)
        return self.taken

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        stop = self.done + FILE_BYTES
        while self.left and self.done < stop:
            one = self.left.pop()
            data, place = self._made(one), one.places[0]
            self.done += data.numel() * data.element_size()
            self.taken.elements += data.numel()
            name = str(data.dtype).removeprefix("torch.")
            self.taken.dtypes[name] = self.taken.dtypes.get(name, 0) + data.numel()
            parts = torch.split(data, [shape[0] for _, shape in one.stored])
            for (suffix, shape), part in zip(one.stored, parts, strict=True):
                offset = (*place.index, *(0 for _ in shape))
                yield place.key + suffix, (*place.counts, *shape), offset, part.view((1,) * len(place.counts) + shape)
            self.told(self.done, self.total)

    def _made(self, one: Mapped) -> torch.Tensor:
        parts, dtype = [], self.dtypes[one.places[0].key]
        for name, _ in one.parts:
            part = self.reader.tensor(name, wide=True)
            if self.reader.is_quantized(name):
                self.taken.widened += 1
                self.taken.rounded += int((part.to(dtype).float() != part).sum())
            parts.append(part)
        return joined(parts, one.layout, self.shape).to(dtype).contiguous()

    def _origin(self) -> dict[str, Any]:
        reader = self.reader
        narrow: dict[str, str] = {}
        for one in self.wanted:
            found = {name: reader.dtype_of(name) for name, _ in one.parts}
            own = self.dtypes[one.places[0].key]
            narrow |= {name: str(dtype).removeprefix("torch.") for name, dtype in found.items() if dtype is not own}
        return {
            "schema": SCHEMA, "layout": PREFIX.rstrip(":"), "config": dict(reader.config), "narrower": narrow,
            "copies": sorted(self.copied), "widened": sum(map(reader.is_quantized, reader.held)),
        }  # fmt: skip


def _add_places(partial: Path, wanted: list[Mapped], known: Mapping[str, Any]) -> None:
    """Adds every parameter's other names to the index: the same bytes under another key."""
    index = read_index(partial, known)
    at = {(key, piece.offset): (stored, piece) for key, stored in index.tensors.items() for piece in stored.pieces}
    for one in wanted:
        first, zeros = one.places[0], (0,) * len(one.shape)
        for suffix, shape in one.stored:
            stored, piece = at[first.key + suffix, (*first.index, *zeros)]
            for place in one.places[1:]:
                whole = (1,) * len(place.counts) + shape
                again = (piece.file, piece.at, (*place.index, *zeros), whole)
                index.add(place.key + suffix, stored.dtype, (*place.counts, *shape), again)
    index.write(partial, "the folder's weights do not make up a checkpoint")


def checkpoint_run(path: Path) -> Run:
    """The run that saved a sealed checkpoint, from its configuration. Raises CheckpointError."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: without it the tensors' model is unknown")
    container = ConfigContainer.load(file, check=False)
    return container.resolved(container.smallest_world(), training=False)


def to_folder(
    path: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: str | None = None,
    method: str | None = None,
    recipe: str | None = None,
    adapters: str | None = None,
    told: ProgressCallback = lambda done, total: None,
) -> Given:
    """Writes the weights of the checkpoint in `path` to the new folder `target`.

    like: a folder whose config.json, tokenizer and vocabulary size the new one gets. dtype: torch's name, instead of the stored dtype;
    'float32' uses the main weights, if there are any. method: the quant_method by which weights are quantized, which `dtype` then does not concern;
    recipe: by another recipe than the run's. adapters: of a checkpoint that has some, one of `ADAPTERS`; for "alone" `like` names the base.
    Raises CheckpointError, BadValue, and Contradiction for a model that the layout cannot describe.
    """
    with opened(path, like=like, dtype=dtype, adapters=adapters) as export:
        refuse_differences(model_of(export.run), export.config)
        export.casting = None if method is None else Served(path, export, method, recipe)
        kept = target.is_symlink() or target.is_mount()  # which the finished folder cannot replace
        if kept or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise BadValue(f"{target} already exists{', a link or a mount point' * kept}: expected a new folder")
        partial = folder_inside(target.parent, f".{target.name}.partial")
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if adapters == "alone":
                given = write_alone(export, partial, like, told, Given(path=target, family=export.family.name))
            else:
                given = export.write(partial, like, told)
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except MpbridgeError:
            with suppress(OSError):
                partial.rmdir()  # empty: refused before anything was written
            raise
        except (OSError, KeyboardInterrupt) as error:
            complete = list(partial.glob("[!.]*.safetensors"))
            said = f"{len(complete)} of its files are complete in {partial}, and the same command goes on from there"
            if not complete:
                said = "nothing of it is kept"
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"interrupted: {target} is not written; {said}") from None
            raise BadValue(f"{target} cannot be written: {error.strerror or error} ({said})") from error
    given.path = target
    return given


@contextmanager
def opened(
    path: Path, *, like: Path | None = None, dtype: str | None = None, adapters: str | None = None
) -> Iterator[Export]:
    """The weights of the checkpoint in `path`, read parameter by parameter. like, dtype, adapters: as for `to_folder`, and it raises the same."""
    store.check(path)
    run = checkpoint_run(path)
    rank = run.facts.shape.lora_rank
    if rank and adapters is None:
        raise Refused(
            f"the checkpoint has adapters of rank {rank}, which no tensor of the model's folder holds: --adapters {', '.join(ADAPTERS[:-1])} or {ADAPTERS[-1]}"
        )
    if adapters and not rank:
        raise BadValue("--adapters: the checkpoint has none (model.lora_rank is not set)")
    origin = _origin(path)
    with Contents(path) as contents, ExitStack() as stack:
        export = Export(contents, run, _config(origin, like, contents, run), origin, dtype)
        if adapters not in (None, "alone"):
            export.merge = stack.enter_context(Merge(path, export, how=str(adapters), like=like))
        yield export


def _origin(path: Path) -> dict[str, Any]:
    """The description of the folder that the checkpoint was made from; {} for a checkpoint of a run."""
    file = path / SOURCE
    found = read_json(file) if file.is_file() else {}
    if not isinstance(found, dict) or (found and not isinstance(found.get("config"), dict)):
        raise CheckpointError(f"{file}: expected the content that mpbridge convert wrote")
    return found


def model_of(run: Run) -> dict[str, Any]:
    """The model section of a run with its defaults filled in, as config.json says it."""
    return dict(run.facts.model) | {name: run.inputs["model"][name] for name in ("vocab_size", "max_sequence_length")}


def _config(origin: Mapping[str, Any], like: Path | None, contents: Contents, run: Run) -> dict[str, Any]:
    if like is not None:
        config = layout.read_config(like)
        family_of(config, str(like / layout.CONFIG))
        return config
    if origin:
        return dict(origin["config"])
    stored = contents.index.tensors.get("embedding.word_embeddings.weight")
    return config_json(model_of(run), rows=run.facts.shape.vocab_size, dtype=stored.dtype if stored else "bfloat16")
