"""The codes and scales of training in a served format: each parameter is quantized as its tensor-parallel ranks held it, then split into the folder's tensors; and contract.json,
which says what a folder holds, tensor by tensor, and by which rule of which run it was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.files import write_whole
from mpbridge.common.formats import DType
from mpbridge.numerics.codes import decode_e2m1
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.numerics.scales import release_of
from mpbridge.numerics.stored import StoredWeight, stored
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.wording import quant_text
from mpbridge.settings.container import Run
from mpbridge.settings.huggingface.kept import full_names
from mpbridge.settings.huggingface.served import (
    CONTRACT,
    LEGACY,
    Cast,
    ServedFormat,
    casts,
    chosen,
    group_of,
    legacy_config,
    quantization_config,
    ranks,
)
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.checkpoint.store import audit_of, step_of
from mpbridge.training.checkpoint.verdict import FILE as FINGERPRINT
from mpbridge.training.checkpoint.verdict import read_fingerprint
from mpbridge.training.serving.files import apart

FILE = CONTRACT
SCHEMA = 1
Quantize = Callable[[Quant, torch.Tensor], StoredWeight]
GATHERED: Mapping[DType | None, torch.dtype] = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
"""dtypes on the wire that linears then read, where parameters are stored wider (FSDP2)."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TrainedWith:
    """The run whose weights are served, as its checkpoint describes it."""

    run: Run
    recipe: str
    policy: PrecisionPolicy
    given: bool
    """Whether the user named a recipe by which weights are quantized otherwise than by the run's."""
    release: tuple[int, int]
    """The Transformer Engine release whose rules apply."""
    stores: bool
    """Whether weights that the recipe stores in a low format were stored so: emulation casts them from the parameters at every step."""
    found: Sequence[Cast]

    @classmethod
    def of(cls, path: Path, run: Run, wanted: Sequence[Mapped], recipe: str | None = None) -> TrainedWith:
        """The run of the checkpoint in `path`. recipe: another recipe than the run's, by name or file."""
        saved = read_fingerprint(path) if (path / FINGERPRINT).is_file() else None
        policy, name = (saved.policy, saved.recipe) if saved is not None else (run.policy, run.recipe)
        found, given = casts(policy, run.facts, wanted), False
        if recipe is not None:
            other = resolve(get_mixed_precision_config(recipe))
            cast = casts(other, run.facts, wanted)
            given = (cast, other.gather) != (found, policy.gather)
            if given:
                policy, name, found = other, recipe, cast
        versions = saved.versions if saved is not None else {}
        release = release_of(run.te or versions.get("transformer_engine") or run.facts.versions.transformer_engine)
        stores = saved is not None and saved.realization == "native" and not given
        return cls(run, name, policy, given, release, stores, found)

    def stored(self, quant: Quant, weight: torch.Tensor) -> StoredWeight:
        """A rank's share of a weight, quantized by its rule."""
        if self.policy.gather in GATHERED and not (quant.stored and self.stores):
            weight = weight.to(GATHERED[self.policy.gather])
        if quant.row.emulation == "torchao":
            return _by_torchao(quant, weight)
        random = Randomness(0, _CPU)  # nothing that is stored of a weight is rounded stochastically
        own: dict[str, Any] = {"release": self.release, "environment": self.run.facts.environment}
        return stored(Quantizer(quant, [], randomness=random, device=_CPU, compiled=False, **own), weight)


@dataclass(frozen=True, slots=True)
class Part:
    """One linear of a folder."""

    codes: torch.Tensor
    scales: torch.Tensor
    """For every row."""
    piece: StoredWeight
    """What it is a part of: the second level."""

    @property
    def values(self) -> torch.Tensor:
        """What it stands for, fp32 [rows, columns]."""
        second = None if self.piece.amax is None else self.piece.amax / self.piece.reach
        return values(self.codes, self.scales, second)


def values(codes: torch.Tensor, scales: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [rows, columns] of codes [rows, columns] (or packed) and a scale for every row and block; second: a multiplier."""
    wide = decode_e2m1(codes) if codes.dtype is torch.uint8 else codes.float()
    factor = torch.exp2(scales.float() - 127) if scales.dtype is torch.uint8 else scales.float()
    factor = factor if second is None else factor * second.float().reshape(())
    length = next((size for size in (16, 32, 128, wide.shape[1]) if -(-wide.shape[1] // size) == factor.shape[1]), 0)
    if not length:
        said = f"scales {list(factor.shape)} of codes {list(wide.shape)}"
        raise BadValue(f"{said}: expected one for each row, or for each 16, 32 or 128 columns")
    return wide * factor.repeat_interleave(length, 1)[:, : wide.shape[1]]


class ServedWeights:
    """The tensors of a folder in a served format, parameter by parameter. row: None: only their values are wanted."""

    def __init__(self, training: TrainedWith, row: ServedFormat | None) -> None:
        self.training, self.facts, self.format = training, training.run.facts, row
        own = {cast.one.name: cast.quant if row is None else cast.served for cast in training.found}
        self.rules: Mapping[str, Quant] = {name: quant for name, quant in own.items() if quant is not None}

    @property
    def row(self) -> ServedFormat:
        """The format."""
        assert self.format is not None
        return self.format

    def covers(self, one: Mapped) -> bool:
        """Whether that parameter is quantized."""
        return one.name in self.rules

    @property
    def notes(self) -> list[str]:
        """Linears that training quantizes and no engine reads so."""
        return [
            f"{cast.one.parts[0][0].removesuffix('.weight')}: trained in {cast.quant.row.words}, served in high precision, as engines compute it"
            for cast in self.training.found
            if cast.quant and not self.covers(cast.one)
        ]

    def from_main(self, one: Mapped) -> bool:
        """Whether training casts from FP32 main weights, not from the parameter: weights that are stored in the low format and trained."""
        training = self.training
        return self.rules[one.name].stored and training.stores and not is_frozen(training.run.policy, one.name)

    def values(self, one: Mapped, whole: torch.Tensor) -> torch.Tensor:
        """What a parameter's codes and scales stand for, fp32 [rows, columns]; the parameter itself if it is not quantized."""
        if not self.covers(one):
            return whole.float()
        # each rank's own, which need not be whole blocks, nor scales of whole rows
        shares = [
            self.training.stored(self.rules[one.name], share) for share in _shares(one, whole, ranks(one, self.facts))
        ]
        return _joined(one, [Part(share.codes, share.scales, share).values for share in shares])

    def parts(
        self, one: Mapped, whole: torch.Tensor, quantize: Quantize | None = None, split: int | None = None
    ) -> dict[str, Part]:
        """Module -> codes and scales, of a quantized parameter [rows, columns]. quantize, split: another rule, another number of ranks."""
        quant, made = self.rules[one.name], quantize or self.training.stored
        shares = _shares(one, whole, ranks(one, self.facts) if split is None else split)
        pieces = [made(quant, share) for share in shares]
        codes = _joined(one, [piece.codes.view(torch.uint8) for piece in pieces])
        whole_rows = quant.row.per_tensor or quant.row.emulation == "torchao"
        scales = _joined(one, [piece.scales for piece in pieces], whole_rows=whole_rows)
        shape = self.facts.shape
        split_up = zip(one.parts, apart(codes, one.layout, shape), apart(scales, one.layout, shape), strict=True)
        dtype = pieces[0].codes.dtype
        return {
            name.removesuffix(".weight"): Part(code.contiguous().view(dtype), scale, pieces[0])
            for (name, _), code, scale in split_up
        }

    def named(self, parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
        """The tensors of linears in the format's layout."""
        row = self.row
        found: dict[str, torch.Tensor] = {}
        for module, part in parts.items():
            scales = part.scales[::128] if row.layout == "blocks" else part.scales
            if row.scale_axes == 1:
                scales = scales.squeeze(1)
            elif row.scale_axes == 4:
                scales = scales[:, None, :, None]
            found |= {f"{module}.{row.codes}": part.codes, f"{module}.{row.scale}": scales.contiguous()}
            if row.second:
                piece = part.piece
                assert piece.amax is not None
                # of a weight of zeros 1, as the divisor is: a scale of 0 is not one
                multiplier = torch.where(piece.amax > 0, piece.amax / piece.reach, 1.0)
                second = piece.divisor.clone() if row.divides else multiplier.reshape(())
                found[f"{module}.{row.second}"] = second
        return found


def is_module(name: str) -> bool:
    """Whether an unquantized tensor of that name belongs to a linear, which engines look up in the list of modules in high precision."""
    return name.endswith(".weight") and not name.endswith(_NO_LINEARS)


_NO_LINEARS = tuple(f"{last}.weight" for last in ("norm", "norm_f", "embed_tokens", "embeddings", "conv1d"))


class Served(ServedWeights):
    """Quantizes the parameters of an export by the rules of its run, or of another recipe, and writes its contract."""

    def __init__(self, path: Path, export: Any, method: str, recipe: str | None = None) -> None:
        """export: the `export.Export`."""
        training = TrainedWith.of(path, export.run, export.wanted, recipe)
        super().__init__(training, chosen(method, training.found, export.run.facts))
        self.path, self._merge = path, export.merge
        self._tensors: Mapping[str, Mapping[str, Any]] = {}

    @property
    def identity(self) -> object:
        """What decides the bytes, besides the checkpoint."""
        training = self.training
        return self.row.name, training.policy.fingerprint(), training.release, training.stores

    def sizes(self, one: Mapped) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name in the folder -> (dtype, shape) of a quantized parameter's tensors."""
        return {
            f"{name.removesuffix('.weight')}.{suffix}": facts
            for name, (rows, columns) in one.parts
            for suffix, facts in self.row.shapes(rows, columns).items()
        }

    @property
    def notes(self) -> list[str]:
        """What the user should know about the folder."""
        made = [
            f"{self.row.name}, quantized by the rule of {self.training.recipe}; {FILE} has each tensor's rule and SHA-256"
        ]
        if self.training.given:
            made.append(f"this is not what the run computed with: its own recipe is {self.training.run.recipe}")
        return [*made, *super().notes, f"activations in the engine: {self.row.activations}"]

    @property
    def kept(self) -> list[str]:
        """Full names of the modules in high precision that engines would otherwise quantize."""
        found = {name for name, facts in self._tensors.items() if is_module(name) and len(facts["shape"]) == 2}
        low = {part for cast in self.training.found if self.covers(cast.one) for part, _ in cast.one.parts}
        # a tied head has no tensor, and is a module nevertheless
        return full_names({name.removesuffix(".weight") for name in {*found, "lm_head.weight"} - low})

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Writes the contract, and ModelOpt's own file; returns the quantization_config."""
        self._tensors = facts
        kept, quants = self.kept, list(dict.fromkeys(self.rules.values()))
        write_whole(folder / FILE, json.dumps(self.document(), indent=1) + "\n")
        if self.row.method == "modelopt":
            write_whole(folder / LEGACY, json.dumps(legacy_config(self.row, kept), indent=2) + "\n")
        return quantization_config(self.row, quants, kept, self.facts.environment)

    def document(self) -> dict[str, Any]:
        """The contract."""
        training = self.training
        modules: dict[str, Any] = {}
        for cast in training.found:
            for name, _ in cast.one.parts if self.covers(cast.one) else ():
                modules[name.removesuffix(".weight")] = self._module(cast, name.removesuffix(".weight"))
        run = read_fingerprint(self.path).as_data() if (self.path / FINGERPRINT).is_file() else None
        return {
            "schema": SCHEMA, "format": self.row.name, "recipe": training.recipe, "fingerprint": training.policy.fingerprint(), "step": step_of(self.path), "audit": audit_of(self.path), "run": run,
            "requantized": training.given or self._merge is not None, "merged": None if self._merge is None else self._merge.facts(), "notes": super().notes, "rules": f"Transformer Engine {'.'.join(map(str, training.release))}",
            "activations": self.row.activations, "high_precision": self.kept, "modules": modules, "tensors": self._tensors,
        }  # fmt: skip

    def _module(self, cast: Cast, module: str) -> dict[str, Any]:
        assert cast.quant is not None
        split = ranks(cast.one, self.facts)
        found = {"parameter": cast.one.name, "rule": quant_text(cast.quant), "group": group_of(module)}
        found["source"] = "float32 main weight" if self.from_main(cast.one) else "parameter"
        if self._merge is not None and self._merge.covers(cast.one):
            found["source"] += " with adapter"
        return found | ({"ranks": split} if split > 1 else {})


def _shares(one: Mapped, whole: torch.Tensor, split: int) -> list[torch.Tensor]:
    """What each tensor-parallel rank holds of a parameter, as megatron-core splits it."""
    if split == 1:
        return [whole]
    if one.split == "row":
        return [share.contiguous() for share in whole.chunk(split, 1)]
    if one.layout != "stacked":
        return list(whole.chunk(split))
    gate, up = (part.chunk(split) for part in whole.chunk(2))
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)]


def _joined(one: Mapped, shares: list[torch.Tensor], *, whole_rows: bool = False) -> torch.Tensor:
    """The inverse of `_shares`, for codes and for scales with one row per row of the weight. whole_rows: the scales are of whole rows."""
    if len(shares) == 1:
        return shares[0]
    if one.split == "row":
        return shares[0] if whole_rows else torch.cat(shares, 1)
    if one.layout != "stacked":
        return torch.cat(shares)
    halves = [share.chunk(2) for share in shares]
    return torch.cat([half[side] for side in (0, 1) for half in halves])


def _by_torchao(quant: Quant, weight: torch.Tensor) -> StoredWeight:
    """A weight as torchao's linear casts it for its forward pass: one scale per output row."""
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    from mpbridge.backend.models.torchao_linears import config_of

    config = config_of(quant, emulate=True)
    cast = config.cast_config_weight
    made: Any = hp_tensor_to_float8_dynamic(
        weight.t(), cast.target_dtype, LinearMMConfig(), gemm_input_role=GemmInputRole.WEIGHT, scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(0, cast.scaling_granularity), round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )  # fmt: skip
    return StoredWeight(made._data.t().contiguous(), (1.0 / made._scale).reshape(-1, 1))
