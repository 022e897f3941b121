"""Low-rank adapters added to the weights of their base, before or after its quantization, with the distance of the result from what training computed with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.settings.huggingface.folder import read_config, tensors
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.serving.cast import ServedWeights, TrainedWith
from mpbridge.training.weights.export import matrices, scale_of, targets
from mpbridge.training.weights.files import FolderReader, check, joined

if TYPE_CHECKING:
    from mpbridge.training.weights.export import Export


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
        self._narrow = {
            name
            for name in low
            if training.stores and self.served.rules[name].stored and is_frozen(training.run.policy, name)
        }
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
        return (quantized if self.how == "merged-after" else self._high(one, source, quantized)) + change

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

    def _high(self, one: Mapped, source: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        if self._like is None or one.name not in self._narrow:
            return source.float()
        return self._given(one, source, quantized)

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
