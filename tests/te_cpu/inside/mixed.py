"""Linears whose GEMMs have rules of their own, over Transformer Engine's hybrid quantizers: the same as emulated, audited, and by a schedule."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge import ConfigContainer, pretrain

from .agreement import played, script, world  # noqa: F401  # fixtures
from .training import BLACKWELL, ROOT, TINY

pytestmark = pytest.mark.skipif(not BLACKWELL, reason="MXFP8 and NVFP4 are a B200's")
RULE = {"fprop": "mxfp8", "dgrad": "nvfp4", "wgrad": "nvfp4"}


@pytest.fixture(autouse=True)
def to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding draws others in each realization."""
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")


@pytest.mark.since((2, 19))
@pytest.mark.parametrize(
    "rule", ["MXFP8 forward, NVFP4 backward", "NVFP4, tensorwise, blockwise", "BF16 forward, MXFP8 backward"]
)
def test_every_linear_is_the_same_but_for_the_order_of_fp32_sums(rule: str, script: Any) -> None:  # noqa: F811
    rows = script.compared(rule, steps=1, **played())
    assert [row for row in rows if row["beyond"]] == []
    assert sum(row["elements"] for row in rows) > 5e5
    assert sum(row["different"] for row in rows) < 1e-3 * sum(row["elements"] for row in rows)


@pytest.mark.since((2, 20))
def test_square_weights_of_mxfp8_are_the_emulated_ones(script: Any) -> None:  # noqa: F811
    rows = script.compared(script.SQUARES, steps=1, **played())
    assert [row for row in rows if row["beyond"]] == []
    assert sum(row["different"] for row in rows) < 1e-3 * sum(row["elements"] for row in rows)


@pytest.mark.since((2, 20))
def test_the_factory_gives_weights_one_scale_per_square() -> None:
    """From the definition: E8M0 of a 32x32 block's amax over E4M3's 448, rounded up; rows differ by 2**-20, which a line's own scale would follow."""
    from types import SimpleNamespace as Role

    from mpbridge.backend.megatron.gemm_factories import GemmFactory
    from mpbridge.precision.megatron_spec.module_rules import factory_name, gemms_named
    from mpbridge.precision.regions import Gemms, Quant

    quant = Quant(format="e4m3", scaling="mxfp8", options=(("square_weights", True),))
    gemms = Gemms(fprop=quant, dgrad=quant, wgrad=quant)
    assert gemms_named(factory_name(gemms)) == gemms
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * torch.exp2(-torch.arange(64) % 21.0)[:, None]
    exponents = torch.ceil(torch.log2(x.abs().view(2, 32, 2, 32).amax((1, 3)) / 448)).to(torch.int32) + 127
    lines = torch.ceil(torch.log2(x.abs().view(64, 2, 32).amax(2) / 448)).to(torch.int32) + 127
    for kind, wanted in (("weight", exponents.repeat_interleave(32, 0)), ("input", lines)):
        made = GemmFactory(gemms)(Role(module_type="linear", tensor_type=kind, name=""))
        found = made(x)._rowwise_scale_inv[:64, :2].to(torch.int32)
        assert torch.equal(found, wanted), kind


def _lines(engine: Any) -> None:
    """A linear's weight is quantized by lines of 32."""
    linear = next(one for name, one in engine.model[0].named_modules() if name.endswith("1.mlp.linear_fc1"))
    linear.quantizers["scaling_fwd"][1].with_2d_quantization = False


@pytest.mark.since((2, 20))
def test_square_weights_are_audited(script: Any) -> None:  # noqa: F811
    hook = audited(script, rules=script.SQUARES)
    assert [text for one in hook.history for text in one.get("faults", ())] == []
    hook = audited(script, _lines, rules=script.SQUARES)
    (linears,) = [one for one in hook.reports["live"].findings if one.subject == "linears"]
    assert not linears.ok
    assert "(weight e4m3 mxfp8)" in linears.found


@pytest.mark.since((2, 19))
def test_other_rules_are_beyond_the_bound(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    real = script.resolved
    names = {"te": "MXFP8 forward, NVFP4 backward", "fast": "MXFP8, weight gradients in BF16"}
    monkeypatch.setattr(script, "resolved", lambda name, emulate, **more: real(names[emulate], emulate, **more))
    rows = script.compared("", steps=1, **played())
    assert {row["tensor"] for row in rows if row["beyond"]} == {"dx", "dw"}


def batches() -> Iterator[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)[None].expand(2, -1)
    yield from itertools.repeat({"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": torch.ones(2, 64)})  # fmt: skip


def audited(script: Any, plant: Any = lambda engine: None, rules: str = "MXFP8 forward, NVFP4 backward") -> Any:  # noqa: F811
    """The report on the second of two steps."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.observe.audit import AuditHook

    with device_layer(True):
        engine = build_engine(script.resolved(rules, "te", **played()))
        hook, training, stream = AuditHook(mode="warn", every=1), SimpleNamespace(engine=engine), batches()
        try:
            hook.built(training)
            hook.started(training)
            for step in range(2):
                if step:
                    plant(engine)
                hook.stepping(training)
                hook.stepped(training, engine.train_step(stream, microbatches=1))
        finally:
            hook.closed()
            engine.close()
    return hook


@pytest.mark.since((2, 19))
def test_an_audit_reads_as_promised(script: Any) -> None:  # noqa: F811
    hook = audited(script)
    assert [text for one in hook.history for text in one.get("faults", ())] == []
    (linears,) = [one for one in hook.reports["live"].findings if one.subject == "linears"]
    assert "fprop e4m3 mxfp8, dgrad e2m1 nvfp4, wgrad e2m1 nvfp4" in linears.found


def _no_factory(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """Every linear runs in one format, as if its own recipe had been forgotten."""
    from megatron.core.extensions import transformer_engine as core
    from transformer_engine.common.recipe import MXFP8BlockScaling

    monkeypatch.setattr(core, "_get_fp8_autocast_for_quant_recipe", lambda rule: core.fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()))  # fmt: skip


def _e5m2_forward(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """One linear's recipe says the rule, and its inputs are rounded to E5M2 for the forward product."""
    from transformer_engine.pytorch.constants import DType

    linear = next(one for name, one in engine.model[0].named_modules() if name.endswith("1.mlp.linear_fc1"))
    linear.quantizers["scaling_fwd"][0].rowwise_quantizer.dtype = DType.kFloat8E5M2


@pytest.mark.since((2, 19))
@pytest.mark.parametrize(("change", "said"), [(_no_factory, "e4m3 mxfp8"), (_e5m2_forward, "fprop input e5m2 mxfp8")])
def test_another_format_is_named(script: Any, monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:  # noqa: F811
    hook = audited(script, lambda engine: change(monkeypatch, engine))
    (linears,) = [one for one in hook.reports["live"].findings if one.subject == "linears"]
    assert not linears.ok
    assert said in linears.found


@pytest.mark.since((2, 19))
def test_rules_heal_to_fp8_late_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of three phases: NVFP4, MXFP8 forward with NVFP4 backward, MXFP8; each audited."""
    monkeypatch.delenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")  # the recipe NVFP4 has read its environment already
    config = ConfigContainer.load(ROOT / "configs/gpt_tiny.yaml", [*TINY, "emulate=te", "target=b200", f"te='{played()['te']}'", "train.audit=stop", "audit.every=1"])  # fmt: skip
    config.mixed_precision = [
        {"recipe": "bf16_with_nvfp4_mixed", "until": 1}, {"recipe": "bf16_mixed", "modules": {"*": RULE}, "until": 2},
        {"recipe": "bf16_with_mxfp8_mixed", "fp8_param": False, "reuse_grad_buf_for_mxfp8_param_ag": False},
    ]  # fmt: skip
    config.logger["log_dir"] = str(tmp_path)
    pretrain(config.resolved(), quiet=True)
    history = json.loads((tmp_path / "precision.json").read_text())["audit"]["history"]
    ran = [one["facts"]["linears"][1] for one in history if one["stage"] == "live"]
    assert [text.partition(", 1 high precision")[0].lstrip("0123456789 ") for text in ran] == [
        "e2m1 nvfp4", "fprop e4m3 mxfp8, dgrad e2m1 nvfp4, wgrad e2m1 nvfp4", "e4m3 mxfp8",
    ]  # fmt: skip
