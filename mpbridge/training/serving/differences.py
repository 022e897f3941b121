"""A served folder, or a stream of (name, tensor), compared with the run: every tensor that is not training's, by which cause, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpbridge.settings.huggingface.folder import FolderTensor
from mpbridge.settings.huggingface.quantization import row_of, settings_faults
from mpbridge.settings.huggingface.served import (
    STATIC,
    UNREAD,
    ServedFormat,
    group_of,
    misfits,
    quantization_config,
)
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.serving.cast import ServedWeights, TrainedWith, values
from mpbridge.training.serving.causes import Source, explanations
from mpbridge.training.serving.convert import opened
from mpbridge.training.serving.export import Export
from mpbridge.training.serving.files import DTYPES, SPELLING, apart, bad_values

KINDS = ("missing", "invalid", "shape", "config", "scales", "group", "bytes", "list", "engine", "extra")
"""What can be wrong, worst first: for equal kinds the larger error of values comes first."""

NO_CONFIG = "is stored quantized, but config.json has no quantization_config"
PLAIN = tuple(DTYPES.values())
"""dtypes of tensors that are not quantized."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in a folder that is not as training had it."""

    name: str
    """A module or tensor of the folder."""
    kind: str
    """One of KINDS."""
    text: str
    error: float = 0.0
    """Norm of the difference of values, relative to training's values."""

    @property
    def weight(self) -> tuple[int, float, str]:
        """Sort key: worst first."""
        return KINDS.index(self.kind), -self.error, self.name


class Comparison:
    """Tensors compared with those of a checkpoint's run as they come, in any order. `compared` makes one.

    config: the folder's quantization_config; {}: not quantized. A parameter is compared once all its tensors are there, and then dropped.
    """

    def __init__(self, export: Export, training: TrainedWith, config: Mapping[str, Any]) -> None:
        self.export, self.training, self.config = export, training, config
        self.row: ServedFormat | None = row_of(config) if config else None
        self.served = ServedWeights(training, self.row)
        scalings = {quant.scaling for quant in self.served.rules.values()}
        self.same_scaling = self.row is not None and bool(scalings) and scalings <= set(self.row.scalings)
        self.misfits: list[str] = []
        if self.row and self.same_scaling:
            self.misfits += misfits(self.row, training.found, self.served.facts)
        self._owner = {name: one for one in export.wanted for name, _ in one.parts}
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._left = {one.name: one for one in export.wanted}

    def see(self, name: str, tensor: torch.Tensor) -> list[Difference]:
        """Takes one tensor; returns the differences of the parameter that it completes."""
        module, _, last = name.rpartition(".")
        if last in STATIC:
            return []
        one = self._owner.get(name) or self._owner.get(f"{module}.weight")
        if one is None:
            again = name in self.export.copies or name.endswith("rotary_emb.inv_freq")
            return [] if again else [Difference(name, "extra", "is not part of the run's model")]
        if one.name not in self._left:
            return [Difference(name, "extra", "came after its parameter was complete, or twice")]
        held = self._held.setdefault(one.name, {})
        held[name] = tensor
        if not self._expected(one, held) <= held.keys():
            return []
        del self._held[one.name], self._left[one.name]
        return list(self._judge(one, held))

    def end(self) -> list[Difference]:
        """The differences of what never became complete, and of the format and its settings."""
        found = list(self._settings())
        if self.row is not None and self.misfits:
            found.append(Difference(self.row.name, "bytes", f"cannot hold training's scales: {self.misfits[0]}"))
        for one in self._left.values():
            held = self._held.get(one.name, {})
            absent = sorted(self._expected(one, held) - held.keys())
            found += [Difference(name, "missing", "is missing") for name in absent]
        return found

    def _settings(self) -> Iterator[Difference]:
        """What the config says that is not as training has it."""
        if self.row is None or not self.same_scaling or self.misfits:
            return
        quants = list(dict.fromkeys(self.served.rules.values()))
        made = quantization_config(self.row, quants, (), self.served.facts.environment)
        for key, text in settings_faults(self.config, made):
            yield Difference(key, "config", text)

    def _expected(self, one: Mapped, held: Mapping[str, torch.Tensor]) -> set[str]:
        names = set()
        for name, size in one.parts:
            module = name.removesuffix(".weight")
            plain = name in held and held[name].dtype in PLAIN
            low = self.served.covers(one) or (name in held and not plain)
            quantized = self.row.shapes(*size) if self.row and low and not plain else {}
            names |= {f"{module}.{suffix}" for suffix in quantized} or {name}
        return names

    def _judge(self, one: Mapped, held: Mapping[str, torch.Tensor]) -> Iterator[Difference]:
        if not self.served.covers(one):
            yield from self._high(one, held)
            return
        whole = self.export.read(one, main=self.served.from_main(one))
        exactly = self.same_scaling and not self.misfits
        parts = self.served.parts(one, whole) if exactly else {}
        trained = [part.values for part in parts.values()] or apart(
            self.served.values(one, whole), one.layout, self.export.shape
        )
        errors: dict[str, float] = {}
        for (name, size), wanted in zip(one.parts, trained, strict=True):
            module = name.removesuffix(".weight")
            faults = list(shape_faults(module, size, held, self.row))
            yield from faults
            if not faults:
                errors[module] = _error(read_values(module, held, self.row), wanted)
        compared = [module for module in errors if exactly and not is_plain(module, held)]
        for module in errors.keys() - set(compared):
            now = "in high precision" if self.row is None or is_plain(module, held) else f"as {self.row.name}"
            was = self.served.rules[one.name].row.words
            yield Difference(module, "bytes", f"trained in {was}, served {now}", errors[module])
        exact = self.served.named(parts) if compared else {}
        wrong = [module for module in compared if not _same(module, held, exact)]
        cause = self._cause(one, whole, held, exact, wrong) if wrong else ""
        for module in wrong:
            yield Difference(module, "bytes", f"{_shares(module, held, exact)}: {cause}", errors[module])

    def _high(self, one: Mapped, held: Mapping[str, torch.Tensor]) -> Iterator[Difference]:
        """A parameter that training keeps in high precision."""
        parts = self.export.parts(one)
        for name, wanted in parts.items():
            tensor = held.get(name)
            module = name.removesuffix(".weight")
            if tensor is None or tensor.dtype not in PLAIN:
                sound = not any(shape_faults(module, wanted.shape, held, self.row))
                error = _error(read_values(module, held, self.row), wanted.float()) if sound else 1.0
                why = "no engine reads it so" if module.endswith(UNREAD) else "training kept it in high precision"
                yield Difference(module, "bytes", f"stored quantized; {why}", error)
            elif tensor.shape != wanted.shape:
                yield Difference(name, "shape", f"is {list(tensor.shape)}, expected {list(wanted.shape)}")
            elif bad := bad_values(tensor):
                yield Difference(name, "invalid", bad, float("inf"))
            elif rounded := int((tensor.float() != wanted.float()).sum()):
                cast, computed = torch.equal(tensor, wanted.to(tensor.dtype)), self.training.policy.compute.torch()
                if cast and tensor.dtype is computed and not one.wide:
                    continue  # an engine reads what training's GEMMs and norms read
                said = f"is stored as {SPELLING[tensor.dtype]}: {rounded:,} values are rounded"
                error = _error(tensor.float(), wanted.float())
                yield Difference(name, "bytes", said if cast else "has other values than the run", error)

    def _cause(
        self,
        one: Mapped,
        whole: torch.Tensor,
        held: Mapping[str, torch.Tensor],
        exact: dict[str, torch.Tensor],
        wrong: list[str],
    ) -> str:
        for words, made in _afterwards(self.row, exact):
            if all(_same(module, held, made) for module in wrong):
                return words
        sources = [Source("the FP32 main weight" if self.served.from_main(one) else "the parameter", whole)]
        other = self.export.found(one, main=not self.served.from_main(one))
        if other is not None and not torch.equal(other.float(), whole.float()):
            sources.append(Source("the parameter" if self.served.from_main(one) else "the FP32 main weight", other))
        for words, parts in explanations(self.served, one, sources):
            made = self.served.named(parts)
            rounded = _narrow(made)
            if all(_same(module, held, made) or _same(module, held, rounded) for module in wrong):
                return words
        return "no known rule gives these bytes"


@contextmanager
def compared(run: Path, config: Mapping[str, Any] | None, recipe: str | None = None) -> Iterator[Comparison]:
    """The comparison with the run of that checkpoint. recipe: another recipe than the run's."""
    with opened(run) as export:
        yield Comparison(export, TrainedWith.of(run, export.run, export.wanted, recipe), config or {})


def _afterwards(
    row: ServedFormat | None, exact: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(cause, training's tensors after something was done to them)."""
    assert row is not None

    def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in exact.items()}

    if row.second:
        words = "the second-level scale is the reciprocal of the format's: divisor and multiplier are confused"
        yield words, changed(row.second, torch.reciprocal)
        yield "the two codes of each byte are swapped", changed(row.codes, lambda codes: codes >> 4 | codes << 4)
    if row.scale_dtype == "F32":
        yield "scales are the reciprocals of the format's", changed(row.scale, torch.reciprocal)
        words = "scales rounded up to powers of two after the cast, codes unchanged"
        yield words, changed(row.scale, lambda scale: torch.exp2(torch.ceil(torch.log2(scale))))
    modules = sorted({name.rpartition(".")[0] for name in exact})
    for other in range(1, len(modules)):
        turned = dict(zip(modules, modules[other:] + modules[:other], strict=True))
        swapped = dict(exact)
        for module, source in turned.items():
            if f"{module}.{row.scale}" in exact and f"{source}.{row.scale}" in exact:
                swapped[f"{module}.{row.scale}"] = exact[f"{source}.{row.scale}"]
        yield "scales of the fused linears are interchanged", swapped


def _narrow(made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.bfloat16() if "scale" in name and tensor.dtype is torch.float32 else tensor
        for name, tensor in made.items()
    }


def is_plain(module: str, held: Mapping[str, torch.Tensor]) -> bool:
    """Whether a linear is stored in high precision."""
    return f"{module}.weight" in held and held[f"{module}.weight"].dtype in PLAIN


def _same(module: str, held: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> bool:
    """Whether codes are equal bit for bit, and scales in value."""
    for name, tensor in made.items():
        if name.rpartition(".")[0] != module:
            continue
        read = torch.Tensor.float if "scale" in name else _bits
        if held[name].shape != tensor.shape or not torch.equal(read(held[name]), read(tensor)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _shares(module: str, held: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> str:
    """'72 % of codes and 92 % of scales differ'."""
    found: dict[str, float] = {}
    for name, tensor in exact.items():
        if name.rpartition(".")[0] == module:
            scale = "scale" in name
            different = held[name].float() != tensor.float() if scale else _bits(held[name]) != _bits(tensor)
            kind = "scales" if scale else "codes"
            found[kind] = max(found.get(kind, 0.0), float(different.float().mean()))
    words = [f"{share:.2%} of {kind}" for kind, share in found.items() if share]
    return f"{' and '.join(words)} differ"


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def shape_faults(
    module: str, size: tuple[int, ...], held: Mapping[str, torch.Tensor], row: ServedFormat | None
) -> Iterator[Difference]:
    """Shapes, dtypes and impossible scales of a quantized linear [rows, columns]."""
    if is_plain(module, held):
        plain = held[f"{module}.weight"]
        if tuple(plain.shape) != tuple(size):
            yield Difference(f"{module}.weight", "shape", f"is {list(plain.shape)}, expected {list(size)}")
        return
    if row is None:
        yield Difference(module, "shape", NO_CONFIG)
        return
    headers = {
        name: FolderTensor("", SPELLING.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in held.items()
    }
    faults = {fault.name: fault for fault in header_faults(module, size, headers, row)}
    for suffix in row.shapes(*size):
        name = f"{module}.{suffix}"
        if name in faults:
            yield faults[name]
        elif bad := (bad_values if suffix == row.codes else bad_scales)(held[name]):
            yield Difference(name, "invalid", bad, float("inf"))


def header_faults(
    module: str, size: tuple[int, ...], held: Mapping[str, FolderTensor], row: ServedFormat
) -> Iterator[Difference]:
    """What is missing of a quantized linear [rows, columns], or of another shape or dtype."""
    for suffix, (dtype, shape) in row.shapes(*size).items():
        name, tensor = f"{module}.{suffix}", held.get(f"{module}.{suffix}")
        if tensor is None:
            yield Difference(name, "missing", "is missing")
        elif tensor.shape != shape and not (suffix == row.single and tensor.shape in ((), (1,))):
            yield Difference(name, "shape", f"is {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype != dtype and (tensor.dtype, dtype) != ("BF16", "F32"):
            yield Difference(name, "shape", f"is {tensor.dtype}, expected {dtype}")


def bad_scales(scales: torch.Tensor) -> str:
    """What makes scales unusable; '' if nothing does. A zero is legal where its block is zero: below a second level."""
    if scales.dtype is torch.uint8:
        return "has the byte 255, which is NaN" if bool((scales == 255).any()) else ""
    wide = scales.float()
    if not bool(wide.isfinite().all()):
        return "has values that are not finite"
    zero_is_legal = scales.dtype is torch.float8_e4m3fn
    if bool((wide < 0).any()) or (not zero_is_legal and bool((wide == 0).any())):
        return f"has values of {float(wide.min()):g}, expected positive ones"
    return ""


def read_values(module: str, held: Mapping[str, torch.Tensor], row: ServedFormat | None) -> torch.Tensor:
    """fp32 values of a linear as the format defines them."""
    if is_plain(module, held):
        return held[f"{module}.weight"].float()
    assert row is not None
    codes, scales = held[f"{module}.{row.codes}"], held[f"{module}.{row.scale}"]
    scales = scales[:, 0, :, 0] if scales.dim() == 4 else scales.reshape(scales.shape[0] if scales.dim() else 1, -1)
    if row.layout == "blocks":
        scales = scales.repeat_interleave(128, 0)[: codes.shape[0]]
    if not row.second:
        return values(codes, scales)
    second = held[f"{module}.{row.second}"].float()
    return values(codes, scales, 1.0 / second if row.divides else second)


def note_second(seconds: dict[str, float], row: ServedFormat | None, name: str, tensor: torch.Tensor) -> None:
    """Adds module -> the scale of its whole tensor, if that is what the tensor holds."""
    if row is not None and row.single and name.endswith(f".{row.single}") and tensor.numel() == 1:
        seconds[name.rpartition(".")[0]] = float(tensor)


def group_faults(seconds: Mapping[str, float]) -> Iterator[Difference]:
    """Fused linears with different scales, of which an engine takes one. seconds: module -> its scale."""
    groups: dict[str, dict[str, float]] = {}
    for module, value in seconds.items():
        groups.setdefault(group_of(module), {})[module.rpartition(".")[2]] = value
    for name, members in groups.items():
        if len(set(members.values())) > 1:
            low, high = min(members.values()), max(members.values())
            said = ", ".join(f"{part} {value:.6g}" for part, value in members.items())
            text = f"scales of the tensor differ among fused linears ({said}): an engine takes one for all"
            yield Difference(name, "group", text, high / low - 1 if low else float("inf"))


def differences(
    run: Path,
    stream: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any] | None,
    *,
    recipe: str | None = None,
) -> list[Difference]:
    """What is not as the run of that checkpoint computed it, worst first; [] if everything is.

    stream: (name in a Hugging Face folder, tensor), as a refit sends them to a rollout engine. config: its quantization_config. Raises BadValue for a format that no
    row of the table describes.
    """
    found: list[Difference] = []
    seconds: dict[str, float] = {}
    with compared(run, config, recipe) as comparison:
        for name, tensor in stream:
            note_second(seconds, comparison.row, name, tensor)
            found += comparison.see(name, tensor)
        found += comparison.end()
    return sorted([*found, *group_faults(seconds)], key=lambda one: one.weight)
