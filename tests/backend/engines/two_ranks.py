"""Two processes that try everything about sharded storage once, and write what each saw as JSON.

`observed(folder)` runs it under torchrun; `python two_ranks.py OUT` is one rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.worlds import reported

BYTES = {
    "fsdp2": ("fp32", "fp32_params_bf16_compute", "bf16_params_fp32_states", "bf16_mixed", "full_bf16"),
    "megatron_fsdp": ("bf16_megatron_fsdp", "bf16_mixed"),
}


def observed(folder: Path, timeout: float = 840.0) -> dict[str, Any]:
    """What both ranks saw; both ranks' errors are shown when one fails."""
    found: dict[str, Any] = reported(2, __file__, folder / "two.json", timeout=timeout)
    return found


def _engine(kind: Any, engine: str, **sections: Any) -> Any:
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    return build_engine(tiny.run(kind, world=2, engine=engine, **sections))


def _steps(engine: Any, count: int = 2, microbatches: int = 2) -> list[Any]:
    import torch.distributed as dist

    from tests.backend.engines import tiny

    batches = tiny.batches(rank=dist.get_rank(), size=2)
    return [engine.train_step(batches, microbatches=microbatches) for _ in range(count)]


def losses(folder: Path) -> Any:
    """Loss and gradient norm of two steps, and before them of the first one's batches twice, without an update: the norm of what the ranks count."""
    found = {}
    for name in ("mcore", "fsdp2", "megatron_fsdp", "optim", "optim_grads"):
        strategy = {"ddp": {"data_parallel_sharding_strategy": name}} if name.startswith("optim") else {}
        built = _engine("fp32", "megatron_fsdp" if strategy else name, **strategy)
        alone = [_counted(built) for _ in range(2)]
        found[name] = [*alone, *((result.loss, result.grad_norm) for result in _steps(built))]
        built.close()
    return found


def _counted(engine: Any) -> tuple[float, float]:
    import torch.distributed as dist

    from tests.backend.engines import tiny

    loss = engine.backward(tiny.batches(rank=dist.get_rank(), size=2), microbatches=2)
    squares = sum(float(gradient.double().square().sum()) for _, gradient in engine.counted_gradients())
    return loss, _summed(squares) ** 0.5


def bytes_a_parameter(folder: Path) -> Any:
    """Role -> bytes over both ranks, a parameter."""
    from mpbridge.numerics.observation.tensors import size

    found: dict[str, Any] = {}
    for engine, kinds in BYTES.items():
        for kind in kinds:
            built = _engine(kind, engine)
            _steps(built, 1)
            total: dict[str, float] = {}
            for live in built.tensors():
                total[live.role] = total.get(live.role, 0) + size(live.tensor)
            parameters = sum(parameter.numel() for _, parameter in built.named_parameters())
            found[f"{engine}/{kind}"] = {
                role: _summed(total.get(role, 0)) / parameters
                for role in ("params", "grads", "main_params", "exp_avg", "exp_avg_sq")
            }
            built.close()
    return found


def _summed(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def compute_and_wire(folder: Path) -> Any:
    """FP32 storage under BF16 compute, reduced in FP32, and again in BF16."""
    import torch

    from mpbridge.numerics.observation.operations import OperationObserver

    found: dict[str, Any] = {}
    for reduce in ("fp32", "bf16"):
        built = _engine({"recipe": "fp32_params_bf16_compute", "grad_reduce_in_fp32": reduce == "fp32"}, "fsdp2")
        seen: dict[str, str] = {}
        linear = built.model[0].decoder.layers[0].mlp.linear_fc1

        def look(module: Any, inputs: Any, output: Any, seen: dict[str, str] = seen) -> None:
            seen.update(weight=str(module.weight.dtype), input=str(inputs[0].dtype), output=str(output[0].dtype))

        linear.register_forward_hook(look)
        with OperationObserver() as wire:
            results = _steps(built)
        parameter = dict(built.named_parameters())["decoder.layers.0.mlp.linear_fc1.weight"]
        moment = built.optimizer.state_of("decoder.layers.0.mlp.linear_fc1.weight")["exp_avg"]
        seen |= {"storage": str(parameter.dtype), "grad": str(parameter.grad.dtype), "moment": str(moment.dtype)}
        seen["rows"] = str(parameter._local_tensor.shape[0])
        reduced = sorted({one.dtype for one in wire.sent if one.kind == "reduce_scatter"})
        found[reduce] = seen | {"reduced": reduced, "loss": results[-1].loss}
        built.close()
    assert torch.get_default_dtype() is torch.float32
    return found


def resumed(folder: Path) -> Any:
    """Whether a saved run goes on to the bit, and what the checkpoint holds."""
    from tests.backend.engines.kept import keep, take

    found = {}
    for engine, kind in (
        ("fsdp2", "bf16_params_fp32_states"),
        ("fsdp2", "fp32_params_bf16_compute"),
        ("megatron_fsdp", "bf16_megatron_fsdp"),
    ):
        # an odd vocabulary: rows that two ranks cannot share evenly
        sections = {"model": {"vocab_size": 65}} if engine == "fsdp2" else {}
        first = _engine(kind, engine, **sections)
        _steps(first, 2)
        place = folder / f"{engine}_{kind}"
        state = first.state()
        dtypes = sorted({str(tensor.dtype) for tensor in state["model"].values()})
        place = keep(state, place)
        straight = _steps(first, 2)
        first.close()
        second = _engine(kind, engine, **sections)
        second.load_state(take(second.state(loading=True), place))
        again = _steps(second, 2)
        second.close()
        found[kind] = {
            "same": [dataclasses.astuple(a) == dataclasses.astuple(b) for a, b in zip(straight, again, strict=True)],
            "model": dtypes,
        }
    return found


def disagreement(folder: Path) -> Any:
    """What each rank is told when rank 1 has another policy."""
    import torch.distributed as dist

    from mpbridge.common.errors import AuditFailed
    from mpbridge.common.formats import DType
    from mpbridge.observe.audit import agree
    from tests.backend.engines import tiny

    policy = tiny.run("bf16", world=2).policy
    same = agree(policy) == policy.fingerprint()
    if dist.get_rank() == 1:
        policy = dataclasses.replace(policy, reduce=DType.BF16)
    try:
        agree(policy)
    except AuditFailed as error:
        return {"same": same, "text": str(error)}
    return {"same": same, "text": ""}


def broken_on_one_rank(folder: Path) -> Any:
    """A moment cast to BF16 on rank 1 only: what every rank's audit says."""
    import torch.distributed as dist

    from mpbridge.observe.audit import audit

    built = _engine("fp32", "fsdp2")
    _steps(built, 1)
    if dist.get_rank() == 1:
        name = next(iter(built.optimizer.shards))
        state = built.optimizer.state_of(name)
        state["exp_avg"] = state["exp_avg"].bfloat16()
    fault = audit(built.run.policy, built, stage="live").find("exp_avg")
    built.close()
    return {"ok": fault.ok, "found": fault.found, "offenders": list(fault.offenders)}


def wire_audited(folder: Path) -> Any:
    """What the audit says of the gradients on the wire: a reduction made BF16 behind FSDP2's back; experts whose activations are reduced in BF16."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    narrow = _engine("fp32_params_bf16_compute", "fsdp2")
    for module in narrow.model[0].modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                # torch 2.15 keeps the policy with each parameter
                for holder in [group] if hasattr(group, "mp_policy") else group.fsdp_params:
                    holder.mp_policy = dataclasses.replace(holder.mp_policy, reduce_dtype=torch.bfloat16)
    found = {"narrow": _wire(narrow)}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
    experts |= {"moe_token_dispatcher_type": "allgather"}
    found["experts"] = _wire(_engine("bf16", "mcore", model=experts, parallel={"expert_model_parallel_size": 2}))
    return found


def _wire(built: Any) -> Any:
    import torch.distributed as dist

    from tests.backend.engines import tiny

    report, _ = tiny.watched(built, tiny.batches(rank=dist.get_rank(), size=2), mode="warn")
    built.close()
    finding = report.find("wire: gradients")
    return [finding.promised, finding.found, [fault.subject for fault in report.faults]]


def norms(folder: Path) -> Any:
    """Gradient norm against one made by hand from the gradients that the optimizer reads, and clipping of those."""
    import torch

    found = {}
    for engine, kind in (("fsdp2", "bf16_params_fp32_states"), ("megatron_fsdp", "bf16_megatron_fsdp")):
        built = _engine(kind, engine, optimizer={"clip_grad": 0.5})
        result = _steps(built, 1)[0]
        grads = [shard.grad for shard in built.optimizer.shards.values() if shard.grad is not None]
        squares = sum(float(grad.float().square().sum()) for grad in grads)
        found[engine] = {"reported": result.grad_norm, "clipped": _summed(squares) ** 0.5}
        assert torch.isfinite(torch.tensor(result.grad_norm))
        built.close()
    return found


MUON = {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1}


def muon_apart(engine: Any, batches: Any, **settings: Any) -> tuple[float, int]:
    """(largest difference of a weight from torch.optim.Muon on whole matrices, over the largest update; number of matrices) after two steps.

    Written by hand: megatron-core's scale `spectral` is sqrt(max(rows, columns)), torch's match_rms_adamw 0.2 of that; queries, keys and values of the
    tiny model's heads are matrices of their own, interleaved by head.
    """
    import torch

    from tests.backend.engines import tiny

    heads, worst, most = tiny.MODEL["num_attention_heads"], 0.0, 0.0
    moments: dict[str, list[torch.Tensor]] = {}
    outside = ("embedding.", "output_layer.")
    matrices = [name for name, p in engine.named_parameters() if p.dim() == 2 and not name.startswith(outside)]
    for _ in range(2):
        before = {name: p.full_tensor().detach().clone() for name, p in engine.named_parameters()}
        assert engine.train_step(batches, microbatches=2).applied
        rate = float(engine.optimizer.param_groups[0]["lr"])
        for name, p in engine.named_parameters():
            if name not in matrices:
                continue

            def apart(whole: torch.Tensor, name: str = name) -> list[torch.Tensor]:
                if "linear_qkv" not in name:
                    return [whole]
                each = whole.reshape(heads, 3, -1, whole.shape[1])
                return [each[:, kind].reshape(-1, whole.shape[1]).contiguous() for kind in range(3)]

            old, new, grads = (apart(one) for one in (before[name], p.full_tensor().detach(), p.grad.full_tensor()))
            kept = moments.setdefault(name, [torch.zeros_like(grad) for grad in grads])
            for weight, grad, moved, momentum in zip(old, grads, new, kept, strict=True):
                own = torch.nn.Parameter(weight.clone())
                own.grad = grad
                theirs = torch.optim.Muon(
                    [own], lr=5 * rate, weight_decay=MUON["weight_decay"] / 5, momentum=0.95, nesterov=False, adjust_lr_fn="match_rms_adamw",
                )  # fmt: skip
                theirs.state[own]["momentum_buffer"] = momentum
                theirs.step()
                worst = max(worst, float((own.detach() - moved).abs().max()))
                most = max(most, float((own.detach() - weight).abs().max()))
    return worst / most, len(matrices)


def muon(folder: Path) -> Any:
    import torch.distributed as dist

    from mpbridge.observe.audit.examine import audit
    from mpbridge.observe.audit.snapshot import Before
    from tests.backend.engines import tiny

    # rows that two ranks cannot share evenly
    built = _engine("fp32", "fsdp2", optimizer=MUON, model={"ffn_hidden_size": 63})
    batches = tiny.batches(rank=dist.get_rank(), size=2)
    apart, matrices = muon_apart(built, batches)
    before = Before(built)
    result = built.train_step(batches, microbatches=2)
    report = audit(built.run.policy, built, stage="live", before=before, result=result, microbatches=2)
    built.close()
    subjects = [report.find(subject) for subject in ("trained by", "newton-schulz")]
    return apart, matrices, {one.subject: (one.found, one.ok) for one in subjects}


def unsharded_modes(folder: Path) -> Any:
    """Why no_shard is refused: Megatron-FSDP's all_reduce_gradients leaves every rank with its own gradients."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import ParamAndGradBuffer

    class Group:
        class main_grad_buffer:
            is_data_distributed = False
            gradient_scaling_factor = None
            data = torch.full((4,), float(dist.get_rank()))
            data_parallel_group = dist.group.WORLD

    class Buffer:
        parameter_groups = (Group,)

        class ddp_config:
            outer_dp_sharding_strategy = "no_shard"
            check_for_nan_in_grad = False

    ParamAndGradBuffer.all_reduce_gradients(Buffer())
    return Group.main_grad_buffer.data.tolist()


SCENARIOS = (
    losses, bytes_a_parameter, compute_and_wire, resumed, disagreement, broken_on_one_rank, wire_audited, norms, muon, unsharded_modes,
)  # fmt: skip


def main() -> None:
    import torch.distributed as dist

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    out = Path(sys.argv[1])
    start_process_group(False, timeout_minutes=2)
    mine = {}
    with device_layer(False, fused_adam=CpuFusedAdam):
        for scenario in SCENARIOS:
            mine[scenario.__name__] = scenario(out.parent)
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, mine)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: [report[name] for report in reports] for name in mine}))
    stop_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        print(f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
