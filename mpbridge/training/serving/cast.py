"""The codes and scales of training in a served format: each parameter is quantized as its tensor-parallel ranks held it, then split into the folder's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.formats import DType
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.numerics.rules import release_of
from mpbridge.numerics.stored import StoredWeight, stored
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.settings.huggingface.served import Cast, ServedFormat, casts, chosen, ranks
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.checkpoint.verdict import FILE, read_fingerprint
from mpbridge.training.weights.layouts import apart

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

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
    """Whether the recipe was named by the user and is not the run's."""
    release: tuple[int, int]
    """The Transformer Engine release whose rules apply."""
    stores: bool
    """Whether weights that the recipe stores in a low format were stored so: emulation casts them from the parameters at every step."""
    found: Sequence[Cast]

    @classmethod
    def of(cls, path: Path, run: Run, wanted: Sequence[Mapped], recipe: str | None = None) -> TrainedWith:
        """The run of the checkpoint in `path`. recipe: another recipe than the run's, by name or file."""
        saved = read_fingerprint(path) if (path / FILE).is_file() else None
        policy, name = (saved.policy, saved.recipe) if saved is not None else (run.policy, run.recipe)
        if recipe is not None:
            policy, name = resolve(get_mixed_precision_config(recipe)), recipe
        versions = saved.versions if saved is not None else {}
        release = release_of(run.te or versions.get("transformer_engine") or run.facts.versions.transformer_engine)
        stores = saved is not None and saved.realization == "native" and recipe is None
        found = casts(policy, run.facts, wanted)
        return cls(run, name, policy, recipe is not None, release, stores, found)

    def quantizer(self, quant: Quant) -> Quantizer:
        """The quantizer of a rule."""
        random = Randomness(0, _CPU)  # nothing that is stored of a weight is rounded stochastically
        return Quantizer(
            quant,
            [],
            randomness=random,
            device=_CPU,
            release=self.release,
            compiled=False,
            environment=self.run.facts.environment,
        )

    def stored(self, quant: Quant, weight: torch.Tensor) -> StoredWeight:
        """A rank's share of a weight, quantized by its rule."""
        if self.policy.gather in GATHERED and not (quant.stored and self.stores):
            weight = weight.to(GATHERED[self.policy.gather])
        return _by_torchao(quant, weight) if quant.row.emulation == "torchao" else stored(self.quantizer(quant), weight)


class ServedWeights:
    """The tensors of a folder in a served format, parameter by parameter."""

    def __init__(self, training: TrainedWith, method: str) -> None:
        self.training, self.facts = training, training.run.facts
        self.row: ServedFormat = chosen(method, training.found, self.facts)
        self.rules: Mapping[str, Quant] = {
            cast.one.name: cast.quant for cast in training.found if cast.quant is not None
        }

    def covers(self, one: Mapped) -> bool:
        """Whether that parameter is quantized."""
        return one.name in self.rules

    def from_main(self, one: Mapped) -> bool:
        """Whether training casts from FP32 main weights, not from the parameter: weights that are stored in the low format."""
        return self.rules[one.name].stored and self.training.stores

    def tensors(
        self, one: Mapped, whole: torch.Tensor, quantize: Quantize | None = None, split: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Name in the folder -> tensor, of a quantized parameter [rows, columns]. quantize, split: another rule, another number of ranks."""
        quant, made = self.rules[one.name], quantize or self.training.stored
        split = ranks(one, self.facts) if split is None else split
        pieces = [made(quant, piece) for piece in _shares(one, whole, split)]
        codes = _joined(one, [piece.codes.view(torch.uint8) for piece in pieces]).view(pieces[0].codes.dtype)
        scales = _joined(
            one,
            [piece.scales for piece in pieces],
            whole_rows=pieces[0].scales.shape[1] == 1 and self.row.layout == "channel",
        )
        out: dict[str, torch.Tensor] = {}
        bits = codes.view(torch.uint8)
        for (name, _), code, scale in zip(
            one.parts,
            apart(bits, one.layout, self.facts.shape),
            apart(scales, one.layout, self.facts.shape),
            strict=True,
        ):
            out |= self.named(name.removesuffix(".weight"), code.contiguous().view(codes.dtype), scale, pieces[0])
        return out

    def named(
        self, module: str, codes: torch.Tensor, scales: torch.Tensor, piece: StoredWeight
    ) -> dict[str, torch.Tensor]:
        """The tensors of one linear. scales: for every row."""
        row = self.row
        if row.layout == "blocks":
            scales = scales[::128]
        if row.scale_axes == 1:
            scales = scales.squeeze(1)
        elif row.scale_axes == 4:
            scales = scales[:, None, :, None]
        found = {f"{module}.{row.codes}": codes, f"{module}.{row.scale}": scales.contiguous()}
        if row.second:
            assert piece.amax is not None
            found[f"{module}.{row.second}"] = (
                piece.divisor.clone() if row.divides else (piece.amax / piece.reach).reshape(())
            )
        return found


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
