"""What the torch-native stacks share: parameters in the dtype that is updated, cast to the compute dtype when they are gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpbridge.formats import DType
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region
from mpbridge.stacks.base import Line
from mpbridge.stacks.meaning import Meaning, changed


def torch_meaning(
    policy: PrecisionPolicy,
    *,
    fused_adam: bool = False,
    wire: DType | None = None,
    accumulator: DType | None = None,
    autocast: bool = False,
    scalings: tuple[str, ...] = (),
    loss_scale: bool = False,
) -> Meaning:
    """The nearest thing to `policy` that fully_shard with a MixedPrecisionPolicy and a torch optimizer make.

    fused_adam: the stack can use Transformer Engine's FusedAdam, with main weights as 16-bit remainders. wire, accumulator: None: the
    policy's reduction, and the stored dtype. autocast: it is on whatever the policy says. scalings: those that the stack has.
    """
    settled = policy.settled()
    own = (settled.main_params or DType.FP32) is settled.params
    aware = fused_adam and bool(settled.precision_aware) and settled.params is DType.BF16 and not own
    storage = settled.params if own or aware else (settled.main_params or DType.FP32)
    adam = storage if not aware else None
    return Meaning(
        storage=storage,
        compute=settled.compute,
        autocast=settled.compute if autocast and settled.mixed else settled.autocast,
        main=DType.FP32 if aware else None,
        remainders=aware,
        wire=wire or settled.reduce,
        accumulator=accumulator or storage,
        exp_avg=adam or settled.exp_avg or DType.FP32,
        exp_avg_sq=adam or settled.exp_avg_sq or DType.FP32,
        sharded="everything",
        loss_scale=settled.loss_scale if loss_scale else None,
        regions=without_storage(settled.regions, scalings),
    )


def without_storage(regions: tuple[Region, ...], scalings: tuple[str, ...]) -> tuple[Region, ...]:
    """Regions whose weights rest in 16 bits, and which lose a scaling that the stack lacks."""

    def there(quant: Quant) -> Quant | None:
        return dataclasses.replace(quant, stored=False) if quant.scaling in scalings else None

    return tuple(changed(region, there) for region in regions)


def missing_scalings(policy: PrecisionPolicy, scalings: Mapping[str, str], nearest: str) -> tuple[Line, ...]:
    """A line for each scaling that a stack does not have. scalings: ours -> its word."""
    lacking = dict.fromkeys(quant.scaling for quant in policy.quants if quant.scaling not in scalings)
    return tuple(
        Line(fidelity="impossible", fact=f"{scaling} quantization", text=f"not there; nearest: {nearest}")
        for scaling in lacking
    )


def ends_text(policy: PrecisionPolicy) -> str:
    """The edge layers that stay in 16 bits, for a note; '' without any."""
    if policy.ends is None:
        return ""
    first, last = policy.ends
    return " and ".join(f"the {word} {count} layers" for word, count in (("first", first), ("last", last)) if count)


SPELL: Mapping[DType, str] = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.FP16: "float16"}
