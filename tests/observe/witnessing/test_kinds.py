"""Each kind of loop from its objects: packages that are not installed here are stood in for by what the table looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.observe.witnessing.deepspeed import UnshardedLoop, Zero3Loop, ZeroLoop
from mpbridge.observe.witnessing.kinds import loop_of
from mpbridge.observe.witnessing.plain import TorchLoop
from tests.observe.witnessing.loops import Tiny, adam


def zero(number: int, model: Any) -> tuple[Any, Any, torch.Tensor]:
    """(DeepSpeed's optimizer of ZeRO 1 or 3 as far as a witness reads it, its inner optimizer, its FP32 partition of `head.weight`)."""
    weight = model.head.weight
    flat = torch.nn.Parameter(torch.arange(float(weight.numel())))
    inner = torch.optim.AdamW([flat], lr=1e-3)
    outer = type("Zero", (), {"__module__": "deepspeed.runtime.zero.stage"})()
    outer.optimizer, outer.loss_scale = inner, 8.0
    if number == 3:
        outer.fp32_partitioned_groups_flat, outer.sub_group_to_group_id = [flat], {0: 0}
        outer.grad_position, outer.get_param_id = {id(weight): (0, 4)}, id
        outer._get_param_partition_rank = lambda one: 0
        for one in model.parameters():
            one.ds_numel, one.ds_tensor = one.numel(), one.detach()
        weight.ds_tensor.ds_numel = 6
    else:
        outer.single_partition_of_fp32_groups = [flat]
        at = SimpleNamespace(start=4, numel=6)
        weight._hp_mapping = SimpleNamespace(param_group_index=0, hp_fragment_address=at, lp_fragment_address=at)
    inner.state[flat] = {"step": torch.tensor(1.0), "exp_avg": flat.detach().clone()}
    return outer, inner, flat


@pytest.mark.parametrize(("number", "kind"), [(1, ZeroLoop), (3, Zero3Loop)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_deepspeeds_partitions_are_cut_to_each_parameter(number: int, kind: type, wrapped: bool) -> None:
    model = Tiny()
    outer, inner, _ = zero(number, model)
    optimizer = type("DeepSpeedOptimizerWrapper", (), {"optimizer": outer})() if wrapped else outer  # accelerate's
    loop: Any = loop_of(model, optimizer)
    assert (type(loop), loop.inner, loop.loss_scale) == (kind, [inner], 8.0)
    (held,) = [one for one in loop.audit_holdings() if one.updated is not None]
    assert held.name == "head.weight"
    assert held.state["exp_avg"].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert held.state["step"].shape == (), "a counter is no partition"


@pytest.mark.parametrize("flat", [False, True])
def test_deepspeed_without_zero_has_a_copy_of_each_parameter_or_one_for_all(flat: bool) -> None:
    model = Tiny().to(torch.bfloat16)
    group = list(model.parameters())
    copies = [one.detach().float() for one in group]
    outer = type("FP16_Optimizer", (), {"__module__": "deepspeed.runtime.fp16.fused_optimizer"})()
    whole = [torch.cat([one.reshape(-1) for one in copies])] if flat else copies
    outer.optimizer, outer.loss_scale, outer.clip_grad = torch.optim.AdamW(whole, lr=1e-3), 8.0, 1.0
    outer.fp16_groups = [group]
    setattr(outer, "fp32_groups_flat" if flat else "fp32_groups", whole if flat else [whole])
    for number, one in enumerate(whole):
        outer.optimizer.state[one] = {"step": torch.tensor(1.0), "exp_avg": torch.full_like(one, float(number))}
    loop: Any = loop_of(model, outer)
    assert (type(loop), loop.loss_scale, loop.configs.optimizer.clip_grad) == (UnshardedLoop, 8.0, 1.0)
    held = {one.name: one for one in loop.audit_holdings()}
    assert len(held) == len(group)
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name].updated, parameter.detach().float().reshape(-1)), name
        assert held[name].state["exp_avg"].shape == (parameter.numel(),)
        assert held[name].state["step"].shape == ()


def test_the_hooks_of_a_step_leave_nothing_behind() -> None:
    model = Tiny()
    outer, inner, _ = zero(1, model)
    type(outer).step = lambda self: "stepped"  # type: ignore[attr-defined]
    told: list[Any] = []
    off = loop_of(model, outer).on_update(told.append)
    assert outer.step() == "stepped"
    assert [one.applied for one in told] == [True]
    off()
    assert "step" not in vars(outer)
    assert not inner._optimizer_step_post_hooks
    outer.step()
    assert len(told) == 1


def test_an_optimizer_of_torch_is_a_plain_loop_with_the_scaler_it_carries() -> None:
    model, scaler = Tiny(), object()
    carrying = SimpleNamespace(optimizer=adam(model), scaler=scaler)
    loop = loop_of(model, carrying)
    assert (type(loop), loop.scaler) == (TorchLoop, scaler)
