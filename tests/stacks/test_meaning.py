"""What a policy means on an engine, however far its tensors are divided."""

from __future__ import annotations

import pytest

from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.stacks.meaning import of_policy
from mpbridge.traits import engine_names


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("sharded", ["nothing", "optimizer", "gradients", "everything"])
def test_weights_that_are_their_own_main_weights_have_no_fp32_copy_wherever_they_lie(engine, sharded) -> None:
    meant = of_policy(resolve(get_mixed_precision_config("full_bf16")), engine=engine, sharded=sharded)
    assert meant.main is None
    assert meant.exp_avg.short == "bf16"
