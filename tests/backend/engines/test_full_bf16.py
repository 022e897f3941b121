"""Full BF16 on megatron-core: eight bytes per parameter, clipping that works, refused where it would silently be something else."""

from typing import Any

import pytest
import torch

from tests.backend.engines import tiny


@pytest.fixture
def build(engines: Any) -> Any:
    return lambda kind="full_bf16", **sections: engines(kind, engine="mcore", **sections)


def test_t1_everything_is_bf16_at_eight_bytes_a_parameter(build: Any) -> None:
    engine = build()
    report, _ = tiny.watched(engine, tiny.batches())
    size = sum(parameter.numel() for _, parameter in engine.named_parameters())
    paid = {finding.subject: finding.bytes / size for finding in report.findings if finding.bytes}
    assert paid == {"params": 2, "grads": 2, "exp_avg": 2, "exp_avg_sq": 2}
    assert report.find("main_params").found == "none"


def test_t2_clipping_works_and_equals_one_in_fp32(build: Any) -> None:
    engine = build(optimizer={"clip_grad": 0.25})
    part = engine.optimizer.chained_optimizers[0]
    seen: dict[str, list[torch.Tensor]] = {}
    real = engine.optimizer.step_with_ready_grads

    def step() -> bool:
        seen["clipped"] = [p.grad.clone() for p in part.get_parameters()]
        return bool(real())

    engine.optimizer.step_with_ready_grads = step
    # called get_main_grads_for_grad_norm before 0.17
    name = "get_grads_for_grad_norm" if hasattr(part, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
    norm_of = getattr(part, name)
    setattr(part, name, lambda: seen.setdefault("before", [g.clone() for g in norm_of()]))
    result = engine.train_step(tiny.batches(), microbatches=2)
    exact = torch.linalg.vector_norm(torch.cat([g.float().flatten() for g in seen["before"]]))
    assert result.grad_norm == pytest.approx(float(exact), rel=1e-5), "no rounding of norms to BF16"
    for before, clipped in zip(seen["before"], seen["clipped"], strict=True):
        wanted = before.float() * (0.25 / (float(exact) + 1e-6))
        assert torch.allclose(clipped.float(), wanted, rtol=2**-8, atol=0)


def test_t2_upstreams_own_clipping_still_refuses(build: Any) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    build()
    with pytest.raises(AssertionError):
        clip_grad_by_total_norm_fp32([parameter], 1.0, 2.0)


def test_t8_low_precision_moments_stay_at_fp32s_loss(build: Any) -> None:
    sharded = {"ddp": {"use_distributed_optimizer": True}}
    losses = {}
    for kind, sections in (("fp32", {}), ("bf16_mixed_bf16_moments", sharded), ("full_bf16", {})):
        engine = build(kind, **sections)
        losses[kind] = tiny.losses(engine, 30)[-1]
        engine.close()
    low = abs(losses["bf16_mixed_bf16_moments"] / losses["fp32"] - 1)
    full = abs(losses["full_bf16"] / losses["fp32"] - 1)
    assert low < 2e-3
    assert full > low


def test_a_nonfinite_gradient_leaves_full_bf16_weights_alone(build: Any) -> None:
    engine = build()
    batches = tiny.batches()
    before = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
    poisoned = ({**batch, "loss_mask": torch.full_like(batch["loss_mask"], float("nan"))} for batch in batches)
    assert not engine.train_step(poisoned, microbatches=1).applied
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.named_parameters())
