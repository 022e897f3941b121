"""The rows of MixedPrecisionConfig's fields: complete, and the only place that lists fields by what they mean."""

from __future__ import annotations

import pytest

from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import traits
from mpbridge.planning.memory.keeps import keeps
from mpbridge.precision.config import ROWS, MixedPrecisionConfig, plain_states
from mpbridge.precision.inert import CONDITIONS
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.resolve import resolve


def test_rows_name_conditions_and_facts_that_exist() -> None:
    assert set(ROWS) == set(MixedPrecisionConfig.__dataclass_fields__)
    assert {row.read_with for row in ROWS.values()} - {""} == set(CONDITIONS)
    facts = [row.fact for row in ROWS.values() if row.fact]
    assert len(facts) == len(set(facts))
    assert set(facts) <= set(PrecisionPolicy.__dataclass_fields__)
    assert all(row.fact for row in ROWS.values() if row.shown)
    assert all(row.state for row in ROWS.values() if row.fused)


OTHER = {
    "DTypeField": [DType.FP32, DType.BF16, DType.UINT8], "bool": [True, False], "bool | None": [True, False],
    "tuple[str, ...] | None": [("*norm*",)],
}  # fmt: skip
BASES = {
    "bf16": {"bf16": True}, "aware": {"bf16": True, "use_precision_aware_optimizer": True}, "narrow": {"bf16": True, "use_precision_aware_optimizer": True, "grad_reduce_in_fp32": False},
    "fp8": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "grad_reduce_in_fp32": False},
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_what_changes_only_what_is_kept_is_a_state(name: str) -> None:
    """A field under which a parameter is kept in other dtypes, and nothing is computed otherwise, is reset where arithmetic is measured."""

    def kept(config: MixedPrecisionConfig) -> tuple[object, object]:
        policy = resolve(config)
        tensors = keeps(policy, traits("mcore"), OptimizerFacts(distributed=True))
        rows = {role: (held.dtype, held.owner) for role, held in tensors.items()}
        return rows, (policy.compute, policy.regions, policy.output, policy.autocast)

    base = MixedPrecisionConfig(**BASES[name])
    before, checked = kept(base), 0
    for field, row in ROWS.items():
        for value in OTHER.get(str(MixedPrecisionConfig.__dataclass_fields__[field].type), ()):
            try:
                after = kept(base.derive(**{field: value}))
            except ValueError:
                continue
            if after[0] != before[0] and after[1] == before[1]:
                assert row.state, field
                checked += 1
    assert checked
    assert resolve(base.derive(**plain_states())).regions[-1].quant is None or "fp8" in name
