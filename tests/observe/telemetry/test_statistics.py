"""Statistics of a run in training: what is written, that it is right, and that training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.common.errors import BadValue
from mpbridge.common.report import metrics
from mpbridge.numerics.certificates.certificate import certificate
from mpbridge.observe.telemetry.hook import StatisticsHook
from mpbridge.observe.telemetry.probe import Noise
from mpbridge.observe.telemetry.records import FILE, OPERANDS, headlines, line, read
from mpbridge.planning.certificates import Training
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.base import Hook
from mpbridge.training.certified import own_tensors
from mpbridge.training.loop import pretrain
from tests.training.tiny import MODEL, tiny

DELAYED, NVFP4 = "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_nvfp4_mixed"


class Weights(Hook):
    def finished(self, training: Any) -> None:
        self.found = {name: tensor.detach().clone() for name, tensor in training.engine.named_parameters()}


def trained(
    folder: Path, recipe: str, every: int, *, steps: int = 4, emulate: bool = True, width: int = 64, length: int = 32
) -> tuple[Path, Weights]:
    out = folder / f"{recipe}-{every}"
    made = tiny(
        folder,
        recipe,
        model=MODEL | {"hidden_size": width, "max_sequence_length": length},
        train={"train_iters": steps, "eval_interval": None},
        logger={"log_dir": str(out), "precision_every": every},
    )
    made.emulate = emulate
    weights = Weights()
    pretrain(made.resolved(), hooks=[weights], quiet=True)
    return out, weights


@pytest.mark.parametrize("recipe", [DELAYED, NVFP4])
def test_measuring_changes_no_bit_of_training(tmp_path: Path, recipe: str) -> None:
    plain, kept = trained(tmp_path, recipe, 0)
    watched, found = trained(tmp_path, recipe, 1)
    losses = [
        [(row["loss"], row["grad_norm"]) for row in metrics.read(folder / "metrics.jsonl")]
        for folder in (plain, watched)
    ]
    assert losses[0] == losses[1]
    assert all(torch.equal(kept.found[name], found.found[name]) for name in kept.found)
    assert not (plain / FILE).exists()
    found = read(watched)
    steps, faults = found.measured, found.faults
    assert ([one.step for one in steps], faults) == ([1, 2, 3, 4], [])
    # two layers of four linears; every operand of their three GEMMs
    sides = {(row["linear"], row["side"]) for row in steps[-1].tables["operands"]}
    assert len(sides) == 2 * 4 * 3
    gemms = {gemm for row in steps[-1].tables["operands"] for gemm in row["gemms"].split("+")}
    assert gemms == {"fprop", "dgrad", "wgrad"}


def test_a_run_in_high_precision_still_shows_its_linears_and_weights(tmp_path: Path) -> None:
    folder, weights = trained(tmp_path, "bf16_mixed", 2, steps=2, emulate=False)
    (one,) = read(folder).measured
    assert one.facts["realization"] == "high precision"
    assert one.tables["operands"] == []
    by_name = {row["parameter"]: row for row in one.tables["weights"]}
    assert set(by_name) == set(weights.found)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert by_name[name]["amax"] == pytest.approx(float(weights.found[name].abs().max()), rel=1e-4)
    assert by_name[name]["main_gap"] == 0.0
    assert all(row["x_amax"] >= row["x_rms"] > 0 for row in one.tables["linears"])


def test_a_certificate_of_a_runs_own_operands_has_the_errors_that_the_run_measured(tmp_path: Path) -> None:
    folder, weights = trained(tmp_path, NVFP4, 2, steps=2, width=128, length=64)
    own = own_tensors(folder)
    assert len(own.linears) == 4
    name = "decoder.layers.1.self_attention.linear_qkv"
    kept, whole = own.linears[name].w, weights.found[f"{name}.weight"].float()
    assert 0 < float((kept - whole[: kept.shape[0], :128]).abs().max()) < 0.01  # one update later
    policy = resolve(get_mixed_precision_config(NVFP4)).settled()
    training = Training(sigma=own.sigma or 0.0, points=((0.0, 1e-3),))
    made = certificate(NVFP4, policy, training, kinds=("normal",), own=own.linears, beside=own.rows, replicas=1)
    compared = 0
    for linear in own.linears:
        for row in own.rows:
            if row.tensor == f"yours: {linear}" and row.quantity == "MSE, as the run measured":
                # a cut-out of a larger operand: query's, key's and value's gradients differ in size, and so do their errors
                cut = own.linears[linear].w.shape != weights.found[f"{linear}.weight"].shape
                assert made.value(row.where, "MSE", row.tensor) == pytest.approx(row.value, rel=0.5 if cut else 0.05)
                compared += 1
    assert compared == 3 * 6  # the output layer is not quantized


def test_a_saturated_tensor_is_the_one_that_stands_out(tmp_path: Path) -> None:
    class Wrong(Hook):
        """One activation's scale is a thousand times too large from step 3 on."""

        def stepping(self, training: Any) -> None:
            table = next(iter(training.engine.emulation.quantizers.values())).forward_table
            at = table.names.index("decoder.layers.1.mlp.linear_fc1.x")
            if training.counters.iteration >= 2:
                table.scale[at] *= 1024

    logger = {"log_dir": str(tmp_path / "run"), "precision_every": 4}
    made = tiny(tmp_path, DELAYED, train={"train_iters": 4, "eval_interval": None, "audit": "warn"}, logger=logger)
    made.emulate = True
    pretrain(made.resolved(), hooks=[Wrong()], quiet=True)
    rows = next(one for one in read(tmp_path / "run").measured if one.step == 4).tables["operands"]
    worst = max(rows, key=lambda row: row["saturated"])
    assert (worst["linear"], worst["side"]) == ("decoder.layers.1.mlp.linear_fc1", "x")
    assert worst["saturated"] > 0.9
    assert worst["staleness"] == pytest.approx(-10, abs=1)


def test_a_step_that_looks_wrong_is_followed_by_a_measured_one() -> None:
    hook = StatisticsHook("unused", every=1000)

    def judge(step: int, loss: float) -> None:
        hook._judge(step, SimpleNamespace(loss=loss, grad_norm=1.0, applied=True))

    for step in range(1, 9):
        judge(step, 4.0 - step / 100)
        assert not hook._alarm
    judge(9, 9.0)
    assert "loss of step 9" in hook._alarm
    hook._alarm = ""
    judge(10, float("nan"))
    assert not hook._alarm, "a run that is wrong at every step is not measured at every step"


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(BadValue, match="precision_every=-1"):
        StatisticsHook("x", every=-1)


def test_the_gradients_noise_is_that_of_the_whole_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, 64, generator=generator) for _ in range(2))
    rounded = [tensor.to(torch.float8_e4m3fn).float() for tensor in (x, dy)]
    noise = Noise()
    noise.note("a", "x", x, rounded[0])
    noise.note("a", "dy", dy, rounded[1])
    noise.note("b", "x", x, x)
    exact = dy.t() @ x
    expected = float(exact.norm() / (rounded[1].t() @ rounded[0] - exact).norm())
    assert noise.ratios() == {"a": pytest.approx(expected, rel=1e-4)}


# --- the file ------------------------------------------------------------------------------------------------------------------------------
def row(linear: str = "l", **values: Any) -> list[Any]:
    known = {"linear": linear, "side": "x", "copy": "row", "gemms": "fprop", "format": "e4m3", "scaling": "delayed"}
    return [{**dict.fromkeys(OPERANDS), **known, **values}[name] for name in OPERANDS]


def test_numbers_for_trackers_are_the_worst_ones() -> None:
    found = headlines({"operands": [row(sqnr=30.0, flushed=0.1), row("m", sqnr=12.0, staleness=-3.0)], "linears": []})
    assert found == {"precision/sqnr_min": 12.0, "precision/flushed_max": 0.1, "precision/staleness_max": 3.0}


def test_damaged_lines_are_left_out_and_said(tmp_path: Path) -> None:
    good = [line({"iteration": step}, {"operands": [row(amax=float("inf"))]}) for step in (1, 2, 3)]
    odd = json.dumps({"schema": 99, "iteration": 4}) + "\n"
    (tmp_path / FILE).write_text(good[0] + "nonsense\n" + good[1] + odd + good[1] + good[2][:-30])
    found = read(tmp_path)
    steps, faults = found.measured, found.faults
    assert [one.step for one in steps] == [1, 2]
    assert steps[0].tables["operands"][0]["amax"] == float("inf")
    said = [fault.partition(": ")[2] for fault in faults]
    assert said == ["unreadable, skipped", "schema 99, this version reads 1", "truncated, skipped"]
    assert "precision_every" in read(tmp_path / "nowhere").faults[0]
