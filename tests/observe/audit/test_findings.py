"""What a row of the report says: what it accepts, and what excuses a fact that nothing was seen of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.traits import traits
from mpbridge.observe.audit.compute import _row_finding
from mpbridge.observe.audit.judge import why_unseen
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.weights import are_codes
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve


class _Theirs(torch.nn.Module):
    __module__ = "transformer_engine.pytorch.module"


@pytest.mark.parametrize(
    ("module", "settings", "excused"),
    [
        pytest.param(_Theirs, {"cross_entropy_loss_fusion": True}, True, id="fused"),
        pytest.param(_Theirs, {"cross_entropy_loss_fusion": False}, False, id="not fused"),
        pytest.param(_Theirs, {}, True, id="nothing says"),
        pytest.param(torch.nn.Identity, {}, False, id="no Transformer Engine"),
    ],
)
def test_a_loss_is_excused_only_where_it_may_be_one_kernel(
    module: Any, settings: dict[str, bool], excused: bool
) -> None:
    engine: Any = SimpleNamespace(model=[module()], configs=SimpleNamespace(model=SimpleNamespace(**settings)))
    assert bool(why_unseen(engine, "loss")) is excused


def test_a_row_names_every_dtype_that_is_accepted() -> None:
    found = _row_finding("norms", [[("norm", ("bf16", "fp32"), ("fp32",))]], [[]])
    assert (found.promised, found.found, found.ok) == ("bf16 or fp32", "fp32", True)
    assert not _row_finding("norms", [[("norm", ("bf16", "fp32"), ("fp16",))]], [[]]).ok


@pytest.mark.parametrize(
    ("parameter", "promised"),
    [
        ("mixer.in_proj.weight", "Float8Tensor"), ("mixer.out_proj.weight", "Float8Tensor"), ("mixer.conv1d.weight", "bf16"),
        ("mixer.norm.weight", "bf16"), ("mixer.in_proj.layer_norm_weight", "bf16"), ("mixer.A_log", "bf16"),
    ],
)  # fmt: skip
def test_only_weights_of_a_mamba_layers_linears_are_promised_as_stored(parameter: str, promised: str) -> None:
    """What megatron-core 0.16.1's MambaModel keeps under stored tensorwise weights, after Float16Module."""
    config = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    run: Any = SimpleNamespace(traits=traits("mcore"), optimizer=OptimizerFacts(), ddp={})
    promises = Promises(policy=resolve(config).settled(), run=run, layers=4)
    assert promises.of("params", f"decoder.layers.1.{parameter}") == promised


def _drawn(kind: str) -> torch.Tensor:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    scale = 448 / values.abs().amax()
    return {
        "ones": torch.ones_like(values), "bf16": values.bfloat16().float(), "fp32": values, "E4M3": (values * scale).to(torch.float8_e4m3fn).float() / scale,
        "E5M2": values.to(torch.float8_e5m2).float(), "few": values[:3].to(torch.float8_e5m2).float(),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["ones", "bf16", "fp32", "few", "E4M3", "E5M2"])
def test_values_of_codes_are_told_from_those_of_sixteen_bits(kind: str) -> None:
    assert are_codes(_drawn(kind)) is (kind in ("E4M3", "E5M2"))
