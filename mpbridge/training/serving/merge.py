"""Low-rank adapters: added to the weights of their base, before or after its quantization, with the distance of the result from what training computed with; or in peft's two files,
under the names of the base in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.common.files import ProgressCallback, write_whole
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.precision.globs import is_adapter, matches, place
from mpbridge.settings.huggingface.folder import FolderTensor, read_config, tensors
from mpbridge.settings.huggingface.tensors import Mapped, adapters
from mpbridge.training.serving.cast import ServedWeights, TrainedWith
from mpbridge.training.serving.export import Export, Given
from mpbridge.training.serving.files import SPELLING, FolderReader, Shards, apart, check, joined

_LAST_BITS = 2.0**-14
"""Share of a tensor's elements whose code may be another than that of the base: where a GPU's scale differs in its last bit from this one, values within 2**-16 of a tie do."""
_HALF_E4M3, _HALF_BF16 = 2.0**-4, 2.0**-9
"""Half the distance of two codes, and of two values in which a checkpoint has them, per value."""


class Merge(ExitStack):
    """Weights with their adapters added: base + alpha / rank x B A. A context manager.

    how: of `ADAPTERS`; "alone": only `verify` is called. like: the base's folder, for a base that the checkpoint has in a low format alone. Raises Refused for a choice that leaves open
    which base is meant, BadValue for a missing base, Contradiction for one of another model.
    """

    def __init__(self, path: Path, export: Export, *, how: str, like: Path | None) -> None:
        super().__init__()
        self.export, self.how, self.scale = export, how, scale_of(export)
        self.served = ServedWeights(TrainedWith.of(path, export.run, export.wanted), None)
        self._targets = {one.name for one in targets(export)}
        self._trained: dict[str, tuple[torch.Tensor, float]] = {}
        self._errors: dict[str, tuple[float, float, float]] = {}
        low = [name for name in self.served.rules if name in self._targets]
        if low and how == "merged":
            raise Refused(
                f"--adapters merged: the run quantizes the base ({low[0]} and others): merged-before adds the adapters to its unquantized weights, "
                "merged-after to the quantized ones that training computed with"
            )
        training = self.served.training
        stored = [name for name in low if training.stores and self.served.rules[name].stored]
        self._narrow = {name for name in stored if is_frozen(training.run.policy, name)}
        taken = bool(self._narrow) if how == "merged-before" else how == "alone" and like is not None
        self._like = self._open(like) if taken else None

    def _open(self, like: Path | None) -> FolderReader:
        held = tensors(like) if like is not None else {}
        if like is None or not held:
            raise BadValue(
                "--adapters merged-before: the frozen base was stored in a low format, so the checkpoint has its quantized values alone: "
                f"--like hf:DIR, the folder of the base with its weights{f' ({like} has none)' if like else ''}"
            )
        reader = self.enter_context(FolderReader(like, held, read_config(like)))
        # tensors that a folder repeats are not read
        copied = {name: of for name, of in self.export.repeated.items() if name in held}
        check(held, self.export.wanted, copied, reader.block)
        return reader

    @property
    def identity(self) -> object:
        """What decides the bytes, besides the checkpoint."""
        if self._like is None:
            return self.how
        files = {one.file for one in self._like.held.values()}
        return [self.how, *((name, (self._like.folder / name).stat().st_mtime_ns) for name in sorted(files))]

    def covers(self, one: Mapped) -> bool:
        """Whether that parameter has an adapter."""
        return one.name in self._targets

    def weight(self, one: Mapped) -> torch.Tensor:
        """The merged weight, fp32 [rows, columns]. Raises Refused after delayed scaling, for a base after quantization."""
        inner, out = matrices(self.export, one)
        change = self.scale * (out.float() @ inner.float())
        source = self.export.found(one, main=self.served.covers(one) and self.served.from_main(one))
        if source is None:
            raise CheckpointError(f"{self.export.contents.folder} has no {one.name}")
        try:
            quantized = self.served.values(one, source)
        except Refused as error:
            if self.how == "merged-after":
                raise Refused(f"--adapters merged-after: {error}: merged-before needs none") from None
            quantized = source.float()
        self._trained[one.name] = quantized + change, float(change.double().square().sum())
        if self.how == "merged-after":
            return quantized + change
        given = self._like is not None and one.name in self._narrow
        return (self._given(one, source, quantized) if given else source.float()) + change

    def verify(self) -> None:
        """Compares the frozen weights beside adapters with those of `like`. Raises BadValue for another base than the run's."""
        for one in targets(self.export):
            source = self.export.found(one)
            if source is not None and is_frozen(self.served.training.run.policy, one.name):
                try:
                    quantized = self.served.values(one, source)
                except Refused:
                    quantized = source.float()
                self._given(one, source, quantized)

    def _given(self, one: Mapped, source: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        """The weight that `like` has, if it is the one that the run began with."""
        assert self._like is not None
        parts = [self._like.tensor(name, wide=True) for name, _ in one.parts]
        high = joined(parts, one.layout, self.export.shape).float()
        count = self._apart(one, high.to(source.dtype), source, quantized)
        if count > high.numel() * _LAST_BITS:
            rule = f"quantized by {self.served.rules[one.name].scaling}" if one.name in self._narrow else "as it is"
            raise BadValue(
                f"--like hf:{self._like.folder}: not the base of this run: {count:,} of {high.numel():,} elements of its {one.name}, {rule}, "
                "are not those that were trained beside, expected none: give the folder that the run began with"
            )
        return high

    def _apart(self, one: Mapped, held: torch.Tensor, source: torch.Tensor, quantized: torch.Tensor) -> int:
        """How many elements of the run's weight are not those of a base, `held` as the run's parameter was.

        A rule that the weight determines is applied to it and has to give the same values. Under delayed scaling the scale is not known: each value has
        to lie within half a code of E4M3, or of the smallest value, below which codes are equally far apart.
        """
        if one.name not in self._narrow:
            return int((held != source).sum())
        try:
            return int((self.served.values(one, held).to(source.dtype) != quantized.to(source.dtype)).sum())
        except Refused:
            stored = quantized.abs()
            least = stored[stored > 0].min() / 2 if stored.any() else stored.new_zeros(())
            bound = torch.maximum(stored * _HALF_E4M3, least) + stored * _HALF_BF16
            return int(((held.float() - quantized).abs() > bound).sum())

    def count(self, one: Mapped, parts: Sequence[torch.Tensor]) -> None:
        """Compares what is written of a parameter with what training computed with."""
        if self.covers(one):
            trained, change = self._trained.pop(one.name)
            written = joined([part.float() for part in parts], one.layout, self.export.shape)
            squares = [float(found.double().square().sum()) for found in (written - trained, trained)]
            self._errors[one.name] = squares[0], squares[1], change

    def facts(self) -> dict[str, Any]:
        """Frobenius norms over all merged weights: the distance from what training computed with, per norm of the weights, and per norm of what the adapters add."""
        distance, norm, change = (sum(column) for column in zip(*self._errors.values(), strict=True))
        worst = max(self._errors, key=lambda name: _ratio(*self._errors[name][:2]) or 0.0)
        return {
            "choice": self.how,
            "linears": len(self._errors),
            "error": _ratio(distance, norm),
            "of_change": _ratio(distance, change),
            "worst": {"parameter": worst, "error": _ratio(*self._errors[worst][:2])},
        }

    @property
    def notes(self) -> list[str]:
        """The same in words."""
        found = self.facts()
        where = {"merged-before": "before quantization", "merged-after": "after quantization"}.get(self.how, "")
        adds = "they add nothing" if found["of_change"] is None else f"{found['of_change']:.2g} of what they add"
        return [
            f"adapters of {found['linears']} linears are merged{f' {where}' if where else ''}: the weights written differ from those trained with by "
            f"{found['error']:.2g} of their norm ({adds}), most in {found['worst']['parameter']} ({found['worst']['error']:.2g})"
        ]


def _ratio(squares: float, whole: float) -> float | None:
    return (squares / whole) ** 0.5 if whole else None


ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's files."""
_UNLOADED = ("mamba2", "nemotron_h"), "mixer.out_proj"
"""Families and the linear whose adapters peft refuses to load (0.21 tuners_utils.py _check_lora_target_modules_mamba): Mamba's fused kernel takes its weight, not its module."""


def scale_of(export: Export) -> float:
    """alpha / rank, by which an adapter's product is multiplied."""
    alpha = export.run.inputs["model"].get("lora_alpha")
    return 1.0 if alpha is None else float(alpha) / export.run.facts.shape.lora_rank


def targets(export: Export) -> Iterator[Mapped]:
    """The parameters with an adapter beside them."""
    for one in export.wanted:
        where = place(one.name.removesuffix(".weight"))
        if one.linear and where and any(matches(glob, where[0]) for glob in export.shape.lora_targets):
            yield one


def matrices(export: Export, one: Mapped) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of that parameter's adapter, as stored or as their main weights. Raises CheckpointError."""
    inner, out = (export.read(matrix) for matrix in adapters(one, export.shape.lora_rank))
    return inner, out


def write_alone(export: Export, folder: Path, like: Path | None, told: ProgressCallback, given: Given) -> Given:
    """Writes peft's files: parts of a fused linear have the same A and their own rows of B. Raises Refused for adapters that peft does not load, and for a base that trained too."""
    _refuse(export)
    made = dict(part for one in targets(export) for part in _parts(export, one))
    plan = {name: FolderTensor(ADAPTER, SPELLING[one.dtype], tuple(one.shape)) for name, one in made.items()}
    with Shards(folder, plan, export.identity(plan), told) as shards:
        for name, tensor in made.items():
            shards.put(name, tensor)
            kind = str(tensor.dtype).removeprefix("torch.")
            given.dtypes[kind] = given.dtypes.get(kind, 0) + tensor.numel()
        write_whole(folder / CONFIG, json.dumps(_config(export, like), indent=2) + "\n")
    given.tensors, given.elements = len(plan), sum(given.dtypes.values())
    given.notes += [f"{CONFIG} names no base: --like hf:DIR does"] if like is None else []
    return given


def _parts(export: Export, one: Mapped) -> Iterator[tuple[str, torch.Tensor]]:
    inner, out = matrices(export, one)
    for (name, _), rows in zip(one.parts, apart(out, one.layout, export.shape), strict=True):
        stem = f"base_model.model.{name.removesuffix('weight')}"
        for letter, matrix in (("A", inner), ("B", rows)):
            dtype = getattr(torch, export.dtype) if export.dtype else matrix.dtype
            yield f"{stem}lora_{letter}.weight", matrix.to(dtype).contiguous()


def _refuse(export: Export) -> None:
    families, linear = _UNLOADED
    names = [one.name for one in targets(export) if one.name.endswith(f"{linear}.weight")]
    if names and export.family.name in families:
        raise Refused(
            f"--adapters alone: peft loads no adapter of {linear} ({len(names)} of them): Mamba's kernel takes that linear's weight, not its module: "
            "merge them, or train with model.lora_targets without it"
        )
    policy = export.run.policy
    trained = [one.name for one in export.wanted if not (is_frozen(policy, one.name) or is_adapter(one.name))]
    if trained:
        raise Refused(
            f"--adapters alone: the base trained too ({trained[0]} and {len(trained) - 1} more parameters), so these adapters do not fit the base that the run began with: "
            "merge them, or train with mixed_precision.frozen=['*']"
        )


def _config(export: Export, like: Path | None) -> dict[str, Any]:
    rank, alpha = export.shape.lora_rank, export.run.inputs["model"].get("lora_alpha")
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None if like is None else str(like), "r": rank,
        "lora_alpha": rank if alpha is None else alpha, "target_modules": _modules(export), "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    }  # fmt: skip


def _modules(export: Export) -> list[str]:
    """The shortest ends of names that mean the linears with adapters and no other."""
    linears = [name.removesuffix(".weight") for one in export.wanted if one.linear for name, _ in one.parts]
    wanted = {name.removesuffix(".weight") for one in targets(export) for name, _ in one.parts}
    found = set()
    for name in wanted:
        words = name.split(".")
        ends = (".".join(words[at:]) for at in range(len(words) - 1, 0, -1))
        found.add(next((e for e in ends if all(x in wanted for x in linears if x.endswith(f".{e}"))), name))
    return sorted(found)
