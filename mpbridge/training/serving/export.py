"""The tensors of a checkpoint in Hugging Face's layout, parameter by parameter, and the files that hold them."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.common.files import ProgressCallback, write_whole
from mpbridge.common.shipped import VERSION
from mpbridge.settings.container import Run
from mpbridge.settings.huggingface import folder as layout
from mpbridge.settings.huggingface.folder import FolderTensor
from mpbridge.settings.huggingface.section import TOKENIZERS, family_of
from mpbridge.settings.huggingface.tensors import CheckpointSlice, Mapped, copies, mapped
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.state import MAIN
from mpbridge.training.serving.cast import Served
from mpbridge.training.serving.files import SPELLED, SPELLING, Shards, apart, bad_values, planned

MAIN_WEIGHTS = (*MAIN, "optimizer.main.")
"""Prefixes of FP32 main weights in checkpoints, for all engines."""
BESIDE = (
    *TOKENIZERS, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
"""Small files copied from the folder given as `like`."""


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
    merged: dict[str, Any] | None = None
    """`Merge.facts`, where adapters were merged."""


def _write_config(
    partial: Path,
    config: dict[str, Any],
    given: Given,
    like: Path | None,
    quantization: dict[str, Any] | None,
    plain: Mapping[str, int],
) -> None:
    """plain: torch's name of a dtype -> elements of what is neither codes nor scales."""
    config = dict(config)
    if config.pop("quantization_config", None) is not None and quantization is None:
        given.notes.append("quantization_config is omitted from config.json: the weights are no longer FP8")
    if quantization is not None:
        config["quantization_config"] = quantization
    largest = max(plain, key=lambda name: plain[name], default="bfloat16")
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = largest
    write_whole(partial / layout.CONFIG, json.dumps(config, indent=2) + "\n")
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
        self.casting: Served | None = None
        self.merge: Any = None
        """`merge.Merge`, where adapters are added to the weights of their base."""
        self.family, self.narrow = family, dict(origin.get("narrower") or {})
        self.wanted = list(mapped(family, run.facts.shape, run.inputs["model"]))
        self.repeated = repeated = copies(family, run.facts.shape)
        # the export of a run repeats what the family's folders contain twice: embedding and head of the multi-token prediction layers
        again = origin.get("copies") if origin else [name for name in repeated if name != "lm_head.weight"]
        self.copies = {name: repeated[name] for name in again or () if name in repeated}
        if rows > self.shape.vocab_size:
            raise BadValue(
                f"config.json has vocab_size={rows}, the checkpoint's embedding {self.shape.vocab_size} rows"
            )

    def write(self, folder: Path, like: Path | None, told: ProgressCallback) -> Given:
        """Writes the whole content of the folder, except for the files of an interrupted export that are complete there."""
        sizes = {one.name: dict(self._sizes(one)) for one in self.wanted}
        plan = planned((name, *size) for parts in sizes.values() for name, size in parts.items())
        given = Given(path=folder, family=self.family.name, left_out=self.shape.vocab_size - self.rows)
        plain: dict[str, int] = {}
        for one in self.wanted:
            low = self.casting is not None and self.casting.covers(one)
            for dtype, size in sizes[one.name].values():
                kind = str(SPELLED[dtype]).removeprefix("torch.")
                for counts in (given.dtypes,) if low else (given.dtypes, plain):
                    counts[kind] = counts.get(kind, 0) + math.prod(size)
        given.tensors, given.elements = len(plan), sum(given.dtypes.values())
        with Shards(folder, plan, self.identity(plan), told) as shards:
            for one in self.wanted:
                if shards.wants(sizes[one.name]) or (self.merge is not None and self.merge.covers(one)):
                    for name, tensor in self._tensors(one):
                        if bad := bad_values(tensor):
                            given.notes.append(f"{name} {bad}: the model computes with them")
                        shards.put(name, tensor)
            shards.index()
            quantization = None
            if self.casting is not None:
                quantization = self.casting.finish(folder, {name: shards.facts[name] for name in plan})
                given.notes += self.casting.notes
            if self.merge is not None:
                given.merged = self.merge.facts()
                given.notes += self.merge.notes
            _write_config(folder, self.config, given, like, quantization, plain)
        return given

    def _sizes(self, one: Mapped) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """Name in the folder -> (dtype, shape), of everything that a parameter becomes."""
        if self.casting is not None and self.casting.covers(one):
            self.read(one, main=self.casting.from_main(one), meta=True)
            yield from self.casting.sizes(one).items()
            return
        for name, tensor in self._plain(one, self.read(one, meta=True)):
            yield name, (SPELLING[tensor.dtype], tuple(tensor.shape))

    def _tensors(self, one: Mapped) -> Iterator[tuple[str, torch.Tensor]]:
        """What a parameter becomes. Raises Refused for one to be quantized whose values are not finite: codes and scales stand for none of them."""
        casting = self.casting if self.casting is not None and self.casting.covers(one) else None
        whole = self.read(one, main=casting is not None and casting.from_main(one))
        if casting is not None:
            if bad := bad_values(whole):
                raise Refused(f"{one.name} {bad}, expected finite ones: convert an earlier checkpoint")
            parts = casting.parts(one, whole)
            if self.merge is not None:
                self.merge.count(one, [part.values for part in parts.values()])
            yield from casting.named(parts).items()
        else:
            written = dict(self._plain(one, whole))
            if self.merge is not None:
                self.merge.count(one, [written[name] for name, _ in one.parts])
            yield from written.items()

    def _plain(self, one: Mapped, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not quantized, with the names under which a folder repeats it."""
        for name, tensor in self.parts(one, whole).items():
            yield name, tensor
            yield from ((other, tensor) for other, original in self.copies.items() if original == name)

    def identity(self, plan: Mapping[str, FolderTensor]) -> str:
        """SHA-256 of what decides every byte of the files."""
        made = {
            "checkpoint": self.contents.manifest["files"], "plan": {name: [one.file, one.dtype, *one.shape] for name, one in plan.items()},
            "casting": None if self.casting is None else self.casting.identity, "merge": None if self.merge is None else self.merge.identity, "mpbridge": VERSION,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    def parts(self, one: Mapped, whole: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Name in the folder -> tensor, of a parameter that is not quantized. whole: the parameter, if it was read."""
        found = {}
        read = self.read(one) if whole is None else whole
        stored = self.read(one, meta=True).dtype  # what adapters were added to is in FP32
        for (name, _), part in zip(one.parts, apart(read, one.layout, self.shape), strict=True):
            if one.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                part = part[: self.rows]
            found[name] = part.to(self._dtype(name, stored, one)).contiguous()
        return found

    def _dtype(self, name: str, stored: torch.dtype, one: Mapped) -> torch.dtype:
        if one.wide:
            return torch.float32
        found: torch.dtype = getattr(torch, self.dtype or self.narrow.get(name) or str(stored).removeprefix("torch."))
        return found

    def found(self, one: Mapped, *, main: bool = False, meta: bool = False) -> torch.Tensor | None:
        """The parameter as stored, or its main weight if FP32 is requested; None if there is none. main: only the main weight; meta: without its elements."""
        tensors = self.contents.index.tensors
        for prefix in MAIN_WEIGHTS if main else (*(MAIN_WEIGHTS if self.dtype == "float32" else ()), ""):
            for at in one.places:
                parts = [(tensors.get(prefix + at.key + suffix), suffix, shape) for suffix, shape in one.stored]
                if all(held is not None and held.shape == (*at.counts, *shape) for held, _, shape in parts):
                    dtype = getattr(torch, parts[0][0].dtype)  # type: ignore[union-attr]
                    if meta:
                        return torch.empty(one.shape, dtype=dtype, device="meta")
                    key = prefix + at.key
                    read = [_whole(self.contents, key + suffix, at, shape, dtype) for _, suffix, shape in parts]
                    return torch.cat(read) if len(read) > 1 else read[0]
        return None

    def read(self, one: Mapped, *, main: bool = False, meta: bool = False) -> torch.Tensor:
        """As `found`, in FP32 with its adapter where one is merged. Raises CheckpointError if there is none."""
        if self.merge is not None and self.merge.covers(one) and not meta:
            merged: torch.Tensor = self.merge.weight(one)
            return merged
        found = self.found(one, main=main, meta=meta)
        if found is not None:
            return found
        tensors = self.contents.index.tensors
        first = one.stored[0][0]
        held = next((tensors[place.key + first] for place in one.places if place.key + first in tensors), None)
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
