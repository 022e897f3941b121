"""Plain torch's loops under a witness: what it says of each, and the faults that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpbridge
from mpbridge.common.errors import AuditFailed, BadValue
from mpbridge.common.versions import release
from mpbridge.interop.stacks.importers import read_text
from tests.observe.witnessing.loops import AUTOCAST, Tiny, adam, loss_of, tokens, train
from tests.worlds import reported

BF16 = torch.bfloat16


def described(seen: Any) -> dict[str, Any]:
    found: dict[str, Any] = seen.report.as_data()["described"]
    return found


def trained(policy: Any = None, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """The witness of a model under AdamW."""
    model = Tiny().to(dtype)
    return train(model, adam(model), policy, **how)


def faults(report: dict[str, Any]) -> set[str]:
    return {one["subject"] for one in report["audit"]["findings"] if not one["ok"] and "not_observed" not in one}


# --- one process -----------------------------------------------------------------------------------------------------------------------------
def test_autocast_is_described_from_what_ran() -> None:
    found = described(trained(autocast=True))
    assert (found["storage"], found["compute"], found["autocast"]) == ("fp32", "bf16", "bf16")
    assert (found["main"], found["accumulator"], found["exp_avg"]) == ("none: the parameters", "fp32", "fp32")
    assert found["wire"].startswith("not observed")
    assert found["bytes_per_parameter"] == pytest.approx(16.0, abs=0.01)
    rows = {(row["kind"], row["module"]): row["dtypes"] for row in found["by_module"]}
    assert rows["GEMMs", "layers.*"] == "bf16"
    assert rows["norms", "norm"] == rows["loss", "cross entropy"] == "fp32"


def test_a_bf16_module_has_neither_main_weights_nor_fp32_states() -> None:
    seen = trained(dtype=BF16)
    found = described(seen)
    assert {found[row] for row in ("storage", "compute", "accumulator", "exp_avg", "exp_avg_sq")} == {"bf16"}
    assert found["bytes_per_parameter"] == pytest.approx(8.0, abs=0.01)
    assert str(seen.report.nearest) == "full_bf16, exactly"


class Pair(list[torch.optim.Optimizer]):
    """Muon for the hidden matrices, AdamW for the rest, as people write them."""

    def __init__(self, model: Tiny) -> None:
        hidden = {id(layer.weight) for layer in model.layers}
        rest = [one for one in model.parameters() if id(one) not in hidden]
        super().__init__(
            [torch.optim.Muon([layer.weight for layer in model.layers], lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
        )

    def step(self) -> None:
        for one in self:
            one.step()

    def zero_grad(self) -> None:
        for one in self:
            one.zero_grad()


def test_muon_beside_adam_is_no_adam() -> None:
    model = Tiny()
    seen = train(model, Pair(model), autocast=True)
    assert described(seen)["exp_avg_sq"] == "none: Muon"
    nearest = seen.report.nearest
    assert "exactly" not in str(nearest)
    assert nearest.differences["exp_avg_sq"] == ("fp32", "none: Muon")
    # what a parameter keeps follows from what trains it: a policy is not broken by Muon's missing second moments
    model = Tiny()
    assert train(model, Pair(model), mpbridge.MixedPrecisionConfig(**AUTOCAST), autocast=True).report.ok
    model = Tiny().to(BF16)
    assert "exp_avg" in faults(train(model, Pair(model), "bf16_mixed").report.as_data())


def test_a_policy_judges() -> None:
    assert trained("full_bf16", BF16).report.ok
    assert faults(trained("bf16_mixed", BF16).report.as_data()) == {"main_params", "exp_avg", "exp_avg_sq"}
    with pytest.raises(AuditFailed, match="deviates from bf16_mixed"):
        trained("bf16_mixed", BF16, on_fault="raise")


def test_autocast_that_is_off_where_it_was_promised_is_named() -> None:
    promised = mpbridge.MixedPrecisionConfig(**AUTOCAST)
    assert trained(promised, autocast=True).report.ok
    assert {"autocast", "compute"} <= faults(trained(promised).report.as_data())


def test_a_stacks_own_configuration_is_a_policy() -> None:
    text = "{compute_environment: X, distributed_type: MULTI_GPU, mixed_precision: bf16}"
    promised = read_text(text, name="accelerate.yaml")
    seen = trained(promised, autocast=True)
    assert seen.report.ok
    assert seen.promised == "accelerate's configuration"
    assert not trained(promised).report.ok


def test_a_weight_that_the_optimizer_does_not_hold_is_named() -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "norm.weight"])
    found = train(model, optimizer).report.as_data()
    # nobody clears its gradient either, which grows from step to step
    assert faults(found) == {"optimizer holds", "gradients"}
    assert "norm.weight" in json.dumps(found["audit"])


def test_gradients_changed_behind_the_backward_pass_are_named() -> None:
    model = Tiny()
    seen = train(model, adam(model), between=lambda step: model.head.weight.grad.mul_(1.5))
    assert faults(seen.report.as_data()) == {"gradients"}


def test_clipping_is_no_fault_and_a_known_norm_is_held_to() -> None:
    assert trained(clip=0.01).report.ok


def test_a_loss_scaler_is_read_and_its_skipped_step_proves_nothing() -> None:
    model, scaler = Tiny(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = adam(model)
    seen = mpbridge.witness(model, optimizer, scaler=scaler)
    for spoiled in (False, True):
        with seen:
            scaler.scale(loss_of(model, tokens(1), autocast=False)).backward()
            if spoiled:
                model.head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    good, skipped = seen.reports
    assert good.ok
    assert good.as_data()["described"]["loss_scale"] == "1024 at this step"
    unseen = {one.subject: one.unseen for one in skipped.report.unseen}
    assert "did not step" in unseen["weights moved"]


def test_nothing_is_left_behind_and_losses_are_the_same_to_the_bit() -> None:
    from torch.nn.modules import module as hooks

    def run(at: set[int]) -> tuple[list[float], torch.Tensor]:
        model = Tiny()
        optimizer, losses = adam(model), []
        seen = mpbridge.witness(model, optimizer, at=at)
        for step in range(3):
            with seen.step():
                loss = loss_of(model, tokens(step), autocast=True)
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            assert not hooks._global_forward_hooks
            assert not hooks._global_forward_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert "step" not in vars(optimizer)
        assert len(seen.reports) == len(at)
        return losses, model.head.weight.detach().clone()

    alone, watched = run(set()), run({1, 2, 3})
    assert alone[0] == watched[0]
    assert torch.equal(alone[1], watched[1])


def test_an_error_inside_of_a_step_takes_the_hooks_off() -> None:
    model = Tiny()
    optimizer = adam(model)
    with pytest.raises(RuntimeError, match="mine"), mpbridge.witness(model, optimizer):
        raise RuntimeError("mine")
    assert not optimizer._optimizer_step_post_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = Tiny()
    with pytest.raises(BadValue, match=r"torch\.nn\.Module"):
        mpbridge.witness("model", adam(model))
    with pytest.raises(BadValue, match="param_groups"):
        mpbridge.witness(model, "adam")
    with pytest.raises(BadValue, match="param_groups"):
        mpbridge.witness(model, [adam(model), None])
    with pytest.raises(BadValue, match="recipe's name"):
        mpbridge.witness(model, adam(model), 3)
    with pytest.raises(BadValue, match="no step was observed"):
        _ = mpbridge.witness(model, adam(model)).report


# --- two processes ---------------------------------------------------------------------------------------------------------------------------
def of_ranks(size: int, factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{case: report} of tests/observe/witnessing/two_ranks.py."""
    program = str(Path(__file__).with_name("two_ranks.py"))
    found: dict[str, Any] = reported(size, program, factory.mktemp("ranks") / "out.json")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of_ranks(2, tmp_path_factory)


ROWS = ("storage", "compute", "autocast", "main", "wire", "accumulator", "exp_avg", "sharded", "bytes_per_parameter")
DEFAULT_WIRE = "bf16" if release(torch.__version__) < release("2.15") else "fp32"
"""What FSDP2 reduces gradients of FP32 parameters in without `reduce_dtype` under `param_dtype=bfloat16`."""
MEANT: dict[str, tuple[str, str, str, str, str, str, str, str, float]] = {
    "ddp fp32": ("fp32", "fp32", "none", "none: the parameters", "fp32", "fp32", "fp32", "nothing", 16.0),
    "ddp autocast": ("fp32", "bf16", "bf16", "none: the parameters", "fp32", "fp32", "fp32", "nothing", 16.0),
    "ddp bf16": ("bf16", "bf16", "none", "none: the parameters", "bf16", "bf16", "bf16", "nothing", 8.0),
    "ddp tied": ("fp32", "fp32", "none", "none: the parameters", "fp32", "fp32", "fp32", "nothing", 16.0),
    "ddp no_sync": ("fp32", "fp32", "none", "none: the parameters", "fp32", "fp32", "fp32", "nothing", 16.0),
    "fsdp2 defaults": ("fp32", "bf16", "none", "none: the parameters", DEFAULT_WIRE, "fp32", "fp32", "everything", 8.0),
    "fsdp2 fp32 wire": ("fp32", "bf16", "none", "none: the parameters", "fp32", "fp32", "fp32", "everything", 8.0),
    "fsdp2 summed": ("fp32", "bf16", "none", "none: the parameters", "fp32", "fp32", "fp32", "everything", 8.0),
    "fsdp2 bf16": ("bf16", "bf16", "none", "none: the parameters", "bf16", "bf16", "bf16", "everything", 4.0),
    "fsdp1": ("fp32", "bf16", "none", "none: the parameters", "fp32", "fp32", "fp32", "everything", 8.0),
    "fsdp1 bf16 wire": ("fp32", "bf16", "none", "none: the parameters", "bf16", "fp32", "fp32", "everything", 8.0),
    "fsdp1 flat": ("fp32", "bf16", "none", "none: the parameters", "fp32", "fp32", "fp32", "everything", 8.0),
    "fsdp1 no_sync": ("fp32", "fp32", "none", "none: the parameters", "fp32", "fp32", "fp32", "everything", 8.0),
}  # fmt: skip
"""Case -> ROWS, from torch's documentation of each wrapper."""


def test_two_processes_are_described_as_they_are_and_raise_no_alarm(two: dict[str, Any]) -> None:
    for case, meant in MEANT.items():
        found = two[case]["described"]
        told = tuple(found[row] for row in ROWS[:-1])
        assert told == meant[:-1], case
        assert found["bytes_per_parameter"] == pytest.approx(meant[-1], rel=0.02), case
        assert two[case]["ok"], (case, faults(two[case]))


FAULTS = {
    "unreduced": {"wire: gradients", "replicas", "gradients"}, "summed": {"gradients"}, "narrow wire": {"wire: gradients", "gradients"},
    "drifted": {"replicas"}, "frozen on one": {"replicas"}, "autocast off": {"autocast", "compute"}, "bf16 wire of fsdp2": {"wire: gradients"},
    "no main weights": {"main_params"},
}  # fmt: skip


def test_every_planted_fault_of_two_processes_is_named(two: dict[str, Any]) -> None:
    for case, subjects in FAULTS.items():
        assert subjects <= faults(two[f"FAULT {case}"]), (case, faults(two[f"FAULT {case}"]))
    assert "2 times too large" in json.dumps(two["FAULT summed"])
    assert "rank 1" in json.dumps(two["FAULT frozen on one"])


# --- four processes: copies of shards --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two copies of two shards."""
    return of_ranks(4, tmp_path_factory)


@pytest.mark.parametrize(
    ("case", "wire"), [("hybrid fsdp2", "fp32"), ("hybrid fsdp2 bf16 wire", "bf16"), ("hybrid fsdp1", "fp32")]
)
def test_copies_of_shards_are_described_as_they_are_and_raise_no_alarm(
    four: dict[str, Any], case: str, wire: str
) -> None:
    found = four[case]["described"]
    told = tuple(found[row] for row in ("storage", "compute", "wire", "accumulator", "exp_avg", "sharded"))
    assert told == ("fp32", "bf16", wire, "fp32", "fp32", "everything")
    assert found["bytes_per_parameter"] == pytest.approx(8.0, rel=0.02), "two of the four ranks hold a copy"
    assert four[case]["ok"], faults(four[case])


def test_copies_that_do_not_average_their_gradients_are_named(four: dict[str, Any]) -> None:
    found = four["FAULT copies apart"]
    assert {"wire: gradients", "gradients"} <= faults(found)
    assert "between copies of shards" in json.dumps(found)


def one_step(model: Any, optimizers: Any, change: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """The report of one step written by hand; change: what the loop does between the backward pass and the update."""
    every = optimizers if isinstance(optimizers, list) else [optimizers]
    watch = mpbridge.witness(model, optimizers, show=None)
    with watch.step():
        loss_of(model, tokens(0), autocast=False).backward()
        change()
        for one in every:
            one.step()
    found: dict[str, Any] = watch.report.as_data()
    return found


def test_a_list_of_optimizers_is_one_update() -> None:
    model = Tiny()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    found = one_step(model, [torch.optim.AdamW(body, lr=1e-3), torch.optim.SGD(model.head.parameters(), lr=1e-2)])
    assert faults(found) == set()
    assert next(one for one in found["audit"]["findings"] if one["subject"] == "weights moved")["found"] == "8 of 8"


def test_clipping_by_value_is_no_fault_and_another_change_is() -> None:
    def clipped() -> Any:
        half = float(model.layers[0].weight.grad.abs().median())
        return torch.nn.utils.clip_grad_value_(model.parameters(), half)

    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        clipped()
        model.layers[0].weight.grad.copy_(change(model.layers[0].weight.grad))

    model = Tiny()
    assert faults(one_step(model, adam(model), clipped)) == set()
    for change in (lambda grad: grad.flip(0), lambda grad: grad.bfloat16().float()):
        model = Tiny()
        assert faults(one_step(model, adam(model), lambda change=change: changed(change))) == {"gradients"}


def test_a_rate_of_0_moves_nothing_and_is_no_fault() -> None:
    model = Tiny()
    groups = [
        {"params": model.emb.parameters(), "lr": 0.0},
        {"params": [*model.layers.parameters(), *model.norm.parameters(), *model.head.parameters()]},
    ]
    assert faults(one_step(model, torch.optim.AdamW(groups, lr=1e-3))) == set()
    model = Tiny()
    found = one_step(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    assert faults(found) == set()
    moved = next(one for one in found["audit"]["findings"] if one["subject"] == "weights moved")
    assert "the learning rate was 0 in this step" in moved["not_observed"]


def test_a_module_that_does_not_run_is_no_fault_and_a_detached_one_is() -> None:
    model = Tiny()
    model.extra = torch.nn.Linear(8, 8)
    found = one_step(model, adam(model))
    assert faults(found) == set()
    moved = next(one for one in found["audit"]["findings"] if one["subject"] == "weights moved")
    assert moved["found"] == "8 of 10, 2 in modules that did not run"
    model = Tiny()
    model.layers[1].register_forward_hook(lambda module, args, out: out.detach())
    assert faults(one_step(model, adam(model))) == {"weights moved"}
