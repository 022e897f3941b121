"""The row type of the table of precision fields: a field of a config, its value under a policy, why, and the versions that have it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from mpbridge.common.versions import Window
from mpbridge.precision.megatron_spec.versions import SINCE_017
from mpbridge.precision.policy import PrecisionPolicy, Quant, Region

Target = Literal["model", "optimizer", "ddp"]
TARGETS: tuple[Target, ...] = ("model", "optimizer", "ddp")


class Absent(enum.Enum):
    """In the place of a value."""

    KEEP = "KEEP"
    UNSET = "UNSET"

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


ALWAYS: Final = Window(package="megatron_core")
"""Every described version."""
KEEP: Final = Absent.KEEP
"""The policy does not decide this field: it keeps, or returns to, its value before any recipe."""
UNSET: Final = Absent.UNSET
"""The inputs do not set this field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRules:
    """The contents of model.quant_recipe without megatron-core's types: the policy's regions in order.

    megatron.quant_recipe compiles it to megatron-core's RecipeConfig for one pipeline stage: megatron-core counts layers per stage, regions do not."""

    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The inputs from which a row's value is computed."""

    policy: PrecisionPolicy
    """The policy as written to megatron-core: without quantization if that is emulated."""
    fp8: Quant | None
    """The FP8 quantization of the run, emulated or not."""
    own: Callable[[Target, str, Any], Any]
    """(target, field, default) -> the target's own value, without any recipe."""
    core: str
    """The described version of megatron-core that represents the targets' version."""

    @property
    def aware(self) -> bool:
        """Whether the optimizer will be precision-aware."""
        stated = self.policy.precision_aware
        return bool(self.own("optimizer", "use_precision_aware_optimizer", False)) if stated is None else stated

    @property
    def wide_stages(self) -> bool:
        """Whether megatron-core itself sends FP32 between stages: since 0.17 its post-init sets pipeline_dtype that way with an FP32 residual stream."""
        if not SINCE_017.holds(self.core):
            return False
        stated = self.policy.residual_fp32
        return bool(self.own("model", "fp32_residual_connection", False)) if stated is None else stated

    @property
    def megatron_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards."""
        return bool(self.own("ddp", "use_megatron_fsdp", False))


ASKED: Final[tuple[tuple[Target, str], ...]] = (
    ("model", "apply_query_key_layer_scaling"),
    ("model", "pipeline_model_parallel_size"),
    ("model", "pipeline_model_parallel_layout"),
    ("model", "account_for_embedding_in_pipeline_split"),
    ("optimizer", "use_distributed_optimizer"),
    ("ddp", "use_distributed_optimizer"),
    ("ddp", "use_megatron_fsdp"),
)
"""Fields beside the table's that decide what it says, or whether megatron-core does it (`sync.unkept`)."""
FieldValue = Callable[[Facts], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionField:
    """One row of the table: a field of one of megatron-core's configs."""

    target: Target
    field: str
    value: FieldValue
    """The field's value under a policy, dtypes as DType; or KEEP."""
    why: str
    default: Any
    """megatron-core's own default, dtypes as DType; a test compares it with the schema of each version."""
    knob: str | None = None
    """Field of MixedPrecisionConfig that preserves an author's value here; None: only another recipe does."""
    turns: Callable[[Facts, Any], bool] = lambda facts, value: True
    """(facts, the author's value) -> whether the knob alone preserves it under this policy."""
    kind: Literal["owned", "cleared"] = "owned"
    """cleared: reset only if the policy makes it illegal or fatal, otherwise left alone."""
    holds: Window = ALWAYS
    """The versions of megatron-core that have the field."""
    none_derives: bool = False
    """Whether None means "derive it", so that it is not an author's choice."""
    follows: str | None = None
    """Field of the same config that megatron-core's post-init copies here: a value equal to it is not an author's choice."""
    compared_as_text: str | None = None
    """The strings that megatron-core compares the value with, if it does; a dtype object has no effect then."""
    required: bool = False
    """Whether a policy that needs more than the default is refused on a version without the field, because nothing else can express it."""

    @property
    def holds_dtype(self) -> bool:
        """Whether the value is a torch dtype, which inputs may give in any spelling."""
        return self.field.endswith("dtype") and self.compared_as_text is None
