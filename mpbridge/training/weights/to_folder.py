"""Converts a checkpoint's weights to a folder in Hugging Face's layout: parameters are split one by one and written in files of a few gigabytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpbridge.common.errors import BadValue, CheckpointError
from mpbridge.common.files import ProgressCallback, read_json
from mpbridge.settings.huggingface import folder as layout
from mpbridge.settings.huggingface.section import TOKENIZERS, family_of
from mpbridge.settings.huggingface.tensors import CheckpointSlice, Mapped, copies, mapped
from mpbridge.settings.huggingface.written import config_json, refuse_differences
from mpbridge.training.checkpoint import store
from mpbridge.training.checkpoint.io import CONFIG
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.state import MAIN
from mpbridge.training.checkpoint.weights_only import SOURCE
from mpbridge.training.weights.layouts import apart
from mpbridge.training.weights.source import library

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

MAIN_WEIGHTS = (*MAIN, "optimizer.main.")
"""Prefixes of FP32 main weights in checkpoints, for all engines."""
FILE_BYTES = 5_000_000_000
"""Maximum size of a safetensors file in bytes, as in transformers."""
BESIDE = (
    *TOKENIZERS,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Small files copied from the folder given as `like`."""


class Casting(Protocol):
    """Quantizes some parameters of an export; the others are written as they are."""

    @property
    def notes(self) -> list[str]:
        """What the user should know about the folder."""

    def covers(self, one: Mapped) -> bool:
        """Whether that parameter is quantized."""

    def from_main(self, one: Mapped) -> bool:
        """Whether `tensors` takes its FP32 main weight instead of the parameter."""

    def tensors(self, one: Mapped, whole: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Name in the folder -> tensor."""

    def saw(self, name: str, tensor: torch.Tensor) -> None:
        """Called with every tensor that is written."""

    def finish(self, folder: Path) -> dict[str, Any]:
        """Called after the last one: writes further files and returns the quantization_config."""


NewCasting = Callable[[Path, "Run", Sequence[Mapped]], Casting]
"""(the checkpoint, its run, the parameters) -> how to quantize them. Raises BadValue for weights that the format cannot hold."""


@dataclass(slots=True)
class Given:
    """The result of an export."""

    path: Path
    family: str
    tensors: int = 0
    elements: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    """torch's name of a dtype -> elements."""
    left_out: int = 0
    """Number of padding rows of the embedding, which are not written."""
    notes: list[str] = field(default_factory=list)


def checkpoint_run(path: Path) -> Run:
    """The run that saved a sealed checkpoint, from its configuration. Raises CheckpointError."""
    from mpbridge.settings.container import ConfigContainer

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
    casting: NewCasting | None = None,
    told: ProgressCallback = lambda done, total: None,
) -> Given:
    """Writes the weights of the checkpoint in `path` to the new folder `target`.

    like: a folder whose config.json, tokenizer and vocabulary size the new one gets. dtype: torch's name, instead of the stored dtype;
    'float32' uses the main weights, if there are any. casting: quantizes weights, which `dtype` then does not concern. Raises CheckpointError, BadValue, and Contradiction for a model that the layout cannot describe.
    """
    with opened(path, like=like, dtype=dtype) as export:
        export.casting = None if casting is None else casting(path, export.run, export.wanted)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise BadValue(f"{target} already exists: expected a new folder")
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            given = export.write(partial, told)
            quantization = None if export.casting is None else export.casting.finish(partial)
            given.notes += [] if export.casting is None else export.casting.notes
            _write_config(partial, export.config, given, like, quantization)
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except OSError as error:
            raise BadValue(f"{target} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    given.path = target
    return given


@contextmanager
def opened(path: Path, *, like: Path | None = None, dtype: str | None = None) -> Iterator[Export]:
    """The weights of the checkpoint in `path`, read parameter by parameter. like, dtype: as for `to_folder`, and it raises the same."""
    store.check(path)
    run = checkpoint_run(path)
    origin = _origin(path)
    model = dict(run.facts.model) | {name: run.inputs["model"][name] for name in ("vocab_size", "max_sequence_length")}
    with Contents(path) as contents:
        yield Export(contents, run, _config(model, origin, like, contents, run), origin, dtype)


def _origin(path: Path) -> dict[str, Any]:
    """The description of the folder that the checkpoint was made from; {} for a checkpoint of a run."""
    file = path / SOURCE
    found = read_json(file) if file.is_file() else {}
    if not isinstance(found, dict) or (found and not isinstance(found.get("config"), dict)):
        raise CheckpointError(f"{file}: expected the content that mpbridge convert wrote")
    return found


def _config(
    model: Mapping[str, Any], origin: Mapping[str, Any], like: Path | None, contents: Contents, run: Run
) -> dict[str, Any]:
    if like is not None:
        config = layout.read_config(like)
        family_of(config, str(like / layout.CONFIG))
        refuse_differences(model, config)
        return config
    if origin:
        return dict(origin["config"])
    stored = contents.index.tensors.get("embedding.word_embeddings.weight")
    return config_json(model, rows=run.facts.shape.vocab_size, dtype=stored.dtype if stored else "bfloat16")


def _write_config(
    partial: Path, config: dict[str, Any], given: Given, like: Path | None, quantization: dict[str, Any] | None
) -> None:
    config = dict(config)
    if config.pop("quantization_config", None) is not None and quantization is None:
        given.notes.append("quantization_config is omitted from config.json: the weights are no longer FP8")
    if quantization is not None:
        config["quantization_config"] = quantization
    plain = {name: count for name, count in given.dtypes.items() if name in ("float32", "bfloat16", "float16")}
    if quantization is not None:
        plain.pop("float32", None)  # that of scales
    largest = max(plain, key=lambda name: plain[name], default="bfloat16")
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = largest
    (partial / layout.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in BESIDE if like is not None else ():
        with suppress(FileNotFoundError):
            shutil.copyfile(like / name, partial / name)  # type: ignore[operator]


class Export:
    """One checkpoint being written to a folder."""

    def __init__(
        self, contents: Contents, run: Run, config: dict[str, Any], origin: Mapping[str, Any], dtype: str | None
    ) -> None:
        self.contents, self.run, self.config, self.shape, self.dtype = contents, run, config, run.facts.shape, dtype
        family = family_of(config)
        self.rows = rows = int(config["vocab_size"])
        self.casting: Casting | None = None
        self.family, self.narrow = family, dict(origin.get("narrower") or {})
        self.wanted = list(mapped(family, run.facts.shape, run.inputs["model"]))
        repeated = copies(run.facts.shape)
        # the export of a run repeats what the family's folders contain twice: embedding and head of the multi-token prediction layers
        again = origin.get("copies") if origin else [name for name in repeated if name != "lm_head.weight"]
        self.copies = {name: repeated[name] for name in again or () if name in repeated}
        if rows > self.shape.vocab_size:
            raise BadValue(
                f"config.json has vocab_size={rows}, the checkpoint's embedding {self.shape.vocab_size} rows"
            )

    def write(self, folder: Path, told: ProgressCallback) -> Given:
        """Writes all safetensors files, and their index if there are several."""
        given = Given(path=folder, family=self.family.name)
        given.left_out = self.shape.vocab_size - self.rows
        total = sum(one.elements for one in self.wanted)
        batch: dict[str, torch.Tensor] = {}
        place: dict[str, int] = {}
        files = size = done = 0
        for name, tensor in self._tensors():
            bytes_here = tensor.numel() * tensor.element_size()
            if batch and size + bytes_here > FILE_BYTES:
                files += 1
                _save(folder, files, batch)
                place |= dict.fromkeys(batch, files)
                batch, size = {}, 0
            if self.casting is not None:
                self.casting.saw(name, tensor)
            batch[name], size = tensor, size + bytes_here
            kind = str(tensor.dtype).removeprefix("torch.")
            given.dtypes[kind] = given.dtypes.get(kind, 0) + tensor.numel()
            given.tensors, given.elements = given.tensors + 1, given.elements + tensor.numel()
            done += tensor.numel()
            told(min(done, total), total)  # codes of FP4 are two to an element, and scales are not counted
        files += 1
        _save(folder, files, batch)
        place |= dict.fromkeys(batch, files)
        _name_files(folder, place, files, sum(f.stat().st_size for f in folder.glob("*.safetensors")))
        return given

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        again: dict[str, list[str]] = {}
        for name, original in self.copies.items():
            again.setdefault(original, []).append(name)
        for one in self.wanted:
            if self.casting is not None and self.casting.covers(one):
                yield from self.casting.tensors(one, self.read(one, main=self.casting.from_main(one))).items()
                continue
            for name, tensor in self.parts(one).items():
                yield name, tensor
                yield from ((other, tensor.clone()) for other in again.get(name, ()))

    def parts(self, one: Mapped) -> dict[str, torch.Tensor]:
        """Name in the folder -> tensor, of a parameter that is not quantized."""
        found = {}
        for (name, _), part in zip(one.parts, apart(self.read(one), one.layout, self.shape), strict=True):
            if one.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                part = part[: self.rows]
            found[name] = part.to(self._dtype(name, part.dtype, one)).contiguous()
        return found

    def _dtype(self, name: str, stored: torch.dtype, one: Mapped) -> torch.dtype:
        if one.wide:
            return torch.float32
        found: torch.dtype = getattr(torch, self.dtype or self.narrow.get(name) or str(stored).removeprefix("torch."))
        return found

    def found(self, one: Mapped, *, main: bool = False) -> torch.Tensor | None:
        """The parameter as stored, or its main weight if FP32 is requested; None if there is none. main: only the main weight."""
        tensors = self.contents.index.tensors
        for prefix in MAIN_WEIGHTS if main else (*(MAIN_WEIGHTS if self.dtype == "float32" else ()), ""):
            for place in one.places:
                stored = tensors.get(prefix + place.key)
                if stored is not None and stored.shape == (*place.counts, *one.shape):
                    return _whole(self.contents, prefix + place.key, place, one.shape, getattr(torch, stored.dtype))
        return None

    def read(self, one: Mapped, *, main: bool = False) -> torch.Tensor:
        """As `found`. Raises CheckpointError if there is none."""
        found = self.found(one, main=main)
        if found is not None:
            return found
        tensors = self.contents.index.tensors
        held = next((tensors[place.key] for place in one.places if place.key in tensors), None)
        if main:
            raise CheckpointError(
                f"{self.contents.folder}: {one.name} has no FP32 main weight, from which training casts it to its low format"
            )
        now = "is missing" if held is None else f"is {list(held.shape)}"
        raise CheckpointError(f"{self.contents.folder}: {one.name} {now}, expected {list(one.shape)}")


def _whole(
    contents: Contents, key: str, place: CheckpointSlice, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    leaf = ShardedTensor(
        key=key,
        data=torch.empty(shape, dtype=dtype),
        dtype=dtype,
        local_shape=shape,
        global_shape=(*place.counts, *shape),
        global_offset=(*place.index, *(0 for _ in shape)),
        axis_fragmentations=None,
        replica_id=0,
        prepend_axis_num=len(place.counts),
    )
    return contents.tensor(leaf)


def _save(folder: Path, number: int, batch: Mapping[str, torch.Tensor]) -> None:
    library().torch.save_file(dict(batch), folder / f"{number}.safetensors", metadata={"format": "pt"})


def _name_files(folder: Path, place: Mapping[str, int], files: int, size: int) -> None:
    """Renames the files as transformers does, now that their number is known."""
    if files == 1:
        (folder / "1.safetensors").rename(folder / layout.SINGLE)
        return
    names = {number: f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)}
    for number, name in names.items():
        (folder / f"{number}.safetensors").rename(folder / name)
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[at] for name, at in sorted(place.items())}}
    (folder / layout.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
