"""Faults on one rank of two, and faults of the wire: one world plants them all in turn; rank 0 writes what the audits named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHARDED = {"use_distributed_optimizer": True}
LATE = 50
START = "rank 1 starts from other weights"
"""Its later form is a drift, which is a case of its own."""


def _on_rank_1(plant: Callable[[Any], None]) -> Callable[[Any], None]:
    import torch.distributed as dist

    def act(engine: Any) -> None:
        if dist.get_rank() == 1:
            plant(engine)

    return act


def _never_reduced(engine: Any) -> None:
    from tests.observe.audit.faults import nothing

    for chunk in engine.model:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group.start_grad_sync = group.finish_grad_sync = nothing
        chunk.start_grad_sync = chunk.finish_grad_sync = nothing


def _reduced_twice(engine: Any) -> None:
    for chunk in engine.model:
        for group in chunk.bucket_groups:
            real = group.start_grad_sync

            def twice(*args: Any, real: Any = real, group: Any = group, **kwargs: Any) -> None:
                real(*args, **kwargs)
                for bucket in group.buckets:
                    import torch.distributed as dist

                    dist.all_reduce(bucket.grad_data)

            group.start_grad_sync = twice


def _reduced_in_bf16(engine: Any) -> None:
    """Gradients travel in BF16 and come back into their FP32 buffers."""
    import torch
    import torch.distributed as dist

    for chunk in engine.model:
        for group in chunk.bucket_groups:

            def narrow(*args: Any, group: Any = group, **kwargs: Any) -> None:
                for bucket in group.buckets:
                    travels = bucket.grad_data.to(torch.bfloat16)
                    dist.all_reduce(travels)
                    bucket.grad_data.copy_(travels / dist.get_world_size())

            group.start_grad_sync = group.finish_grad_sync = narrow


def _fsdp2_reduces_in_bf16(engine: Any) -> None:
    import dataclasses

    import torch

    for module in engine.model[0].modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        if group is not None:
            # its first forward pass reads the policy, later ones what was made of it
            group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=torch.bfloat16)
            group._reduce_dtype = torch.bfloat16


def _other_weights(engine: Any) -> None:
    import torch

    with torch.no_grad():
        for _, parameter in engine.named_parameters():
            getattr(parameter, "_local_tensor", parameter).add_(0.01)
    if hasattr(engine.optimizer, "reload_model_params"):
        engine.optimizer.reload_model_params()


def _no_gather(engine: Any) -> None:
    from tests.observe.audit.faults import nothing

    for chunk in engine.model:
        for group in chunk.bucket_groups:
            group.start_param_sync = nothing
        chunk.start_param_sync = nothing


def _last_weight_doubled(engine: Any) -> None:
    """A weight of the stage's last layer is updated by twice its gradient."""
    from tests.observe.audit.faults import after, gpt

    weight = gpt(engine).decoder.layers[-1].mlp.linear_fc2.weight
    after(engine.configs.model, "finalize_model_grads_func", lambda: weight.main_grad.mul_(2))


def _more_between_stages(engine: Any) -> None:
    """Something else travels along the pipeline than activations."""
    import torch
    import torch.distributed as dist

    from tests.observe.audit.faults import after

    def send() -> None:
        tensor = torch.zeros(64, dtype=torch.bfloat16)
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)

    after(engine, "train_step", send)


def _drift(engine: Any) -> None:
    import torch

    from tests.observe.audit.faults import linear, parts

    with torch.no_grad():
        linear(engine).weight[0, 0] += 0.25
    for part in parts(engine):
        part.reload_model_params()


def _inner_frozen(engine: Any) -> None:
    """Only the inner optimizer: its wrapper's gather has to go on, or the ranks wait for each other."""
    from tests.observe.audit.faults import nothing, parts

    for part in parts(engine):
        part.optimizer.step = nothing


def _stale_scales(engine: Any) -> None:
    """The ranks still reduce their amaxes together, and this one goes on with its old scales."""
    from tests.observe.audit.compute_faults import tables
    from tests.observe.audit.faults import around

    def kept(table: Any) -> Callable[[], None]:
        scale = table.scale.clone()
        return lambda: setattr(table, "scale", scale)

    for table in tables(engine):
        around(table, "update", lambda table=table: kept(table))


def _unsynced(engine: Any) -> None:
    engine.configs.model.no_sync_func = None
    engine.model[0].set_requires_gradient_sync(False)
    real = engine.model[0].set_requires_gradient_sync
    engine.model[0].set_requires_gradient_sync = lambda *args, **kwargs: real(False)


def _sent_in_fp16(engine: Any) -> None:
    """Something is summed over the tensor-parallel ranks in another dtype than activations have."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from tests.observe.audit.faults import after

    def send() -> None:
        dist.all_reduce(torch.zeros(64, dtype=torch.float16), group=parallel_state.get_tensor_model_parallel_group())

    after(engine, "train_step", send)


def _amaxes_not_reduced(engine: Any) -> None:
    from tests.observe.audit.compute_faults import tables
    from tests.observe.audit.faults import instead

    for table in tables(engine):
        instead(table, "update", lambda real, *args, **kwargs: real(None))


def _other_seed(engine: Any) -> None:
    engine.emulation.randomness.seed += 1


def _older_step(engine: Any) -> None:
    from tests.observe.audit.faults import instead

    instead(engine.emulation.randomness, "begin", lambda real, step: real(step - 1))


def cases() -> dict[str, tuple[str, Callable[[Any], None], int, set[str]]]:
    """Name -> (engine of the catalogue, what is planted, after which step, rows that may name it)."""
    import torch

    from tests.observe.audit import compute_faults as c
    from tests.observe.audit import faults as f
    from tests.observe.audit import step_faults as s

    return {
        "never reduced": ("ddp", _never_reduced, 0, {"wire: gradients", "gradients", "replicas"}),
        "never reduced, sharded": ("dist", _never_reduced, 0, {"wire: gradients", "gradients"}),
        "reduced twice": ("ddp", _reduced_twice, 0, {"wire: gradients", "gradients"}),
        "reduced in BF16": ("ddp", _reduced_in_bf16, 0, {"wire: gradients", "gradients"}),
        "FSDP2 reduces in BF16": ("fsdp2", _fsdp2_reduces_in_bf16, 0, {"wire: gradients", "gradients"}),
        "FSDP2 never reduces": ("fsdp2", _unsynced, 0, {"wire: gradients", "gradients", "weights moved"}),
        START: ("ddp", _on_rank_1(_other_weights), 0, {"replicas"}),
        "rank 1 drifts": ("ddp", _on_rank_1(_drift), 4, {"replicas"}),
        "parameters not gathered": ("dist", _no_gather, 0, {"replicas"}),
        "rank 1's optimizer frozen": ("ddp", _on_rank_1(f.optimizer_frozen), 0, {"weights moved", "replicas"}),
        "rank 1's shard frozen": ("dist", _on_rank_1(_inner_frozen), 4, {"weights moved", "weights as read"}),
        "rank 1's FSDP2 shard frozen": ("fsdp2", _on_rank_1(f.optimizer_frozen), 0, {"weights moved"}),
        "rank 1's moment in BF16": ("dist", _on_rank_1(f.cast_state("exp_avg", torch.bfloat16)), 4, {"exp_avg", "invariants"}),
        "rank 1 never refreshes": ("dist", _on_rank_1(f.model_never_refreshed), 0, {"weights as read"}),
        "rank 1 under autocast": ("ddp", _on_rank_1(c.autocast_on), 0, {"autocast"}),
        "rank 1 unquantized": ("tensorwise", _on_rank_1(c.paused), 0, {"quantized GEMMs"}),
        "rank 1 has a linear unplugged": ("tensorwise", _on_rank_1(c.unplugged), 0, {"linears", "invariants"}),
        "rank 1's scales frozen": ("delayed", _on_rank_1(_stale_scales), 1, {"delayed scales"}),
        "rank 1 loses a gradient": ("ddp", _on_rank_1(f.change_gradients(torch.zeros_like)), 0, {"gradients", "weights moved", "replicas"}),
        "more travels between stages": ("pipeline", _more_between_stages, 0, {"wire: stages"}),
        "a gradient doubled on the second stage": ("pipeline", _on_rank_1(_last_weight_doubled), 0, {"gradients"}),
        "all gradients halved, sum of tokens": ("sum of tokens", f.change_gradients(lambda grad: grad * 0.5, ""), 0, {"gradients"}),
        "rank 1's main weight one ulp apart": ("ddp", _on_rank_1(s.one_ulp_apart("main")), 1, {"replicas"}),
        "rank 1's moment one ulp apart": ("ddp", _on_rank_1(s.one_ulp_apart("exp_avg")), 1, {"replicas"}),
        "rank 1's rotary frequencies": ("ddp", _on_rank_1(s.frequencies_times(1.01)), 0, {"replicas"}),
        "rank 1's rate": ("dist", _on_rank_1(s.rate_times(1.1)), 1, {"optimizer settings"}),
        "rank 1's rate on FSDP2": ("fsdp2", _on_rank_1(s.rate_times(1.1)), 1, {"optimizer settings"}),
        "rank 1's rate on Megatron-FSDP": ("mfsdp", _on_rank_1(s.rate_times(1.1)), 1, {"optimizer settings"}),
        "rank 1's embedding gradient through FP16": ("ddp", _on_rank_1(c.hook_on_gradients(torch.float16)), 0, {"compute"}),
        "rank 1 rounds by another seed": ("nvfp4", _on_rank_1(_other_seed), 1, {"replicas"}),
        "rank 1 rounds by an older step": ("nvfp4", _on_rank_1(_older_step), 1, {"replicas"}),
        "tensor-parallel ranks sum in FP16": ("sequence parallel", _sent_in_fp16, 0, {"wire: tensor"}),
        "healthy, sequence parallel": ("blockwise sequence parallel", f.nothing, 0, set()),
        "amaxes not reduced": ("delayed", _amaxes_not_reduced, 0, {"replicas"}),
        "experts' gradients halved": ("experts apart", f.change_gradients(lambda grad: grad * 0.5, "local_experts.0.linear_fc1.weight"), 0, {"gradients"}),
        "healthy, experts apart": ("experts apart", f.nothing, 0, set()),
        "healthy, sum of tokens": ("sum of tokens", f.nothing, 0, set()),
        "healthy, pipeline": ("pipeline", f.nothing, 0, set()),
        "healthy": ("ddp", f.nothing, 0, set()),
        "healthy, sharded": ("dist", f.nothing, 0, set()),
        "healthy, FSDP2": ("fsdp2", f.nothing, 0, set()),
        "healthy, Megatron-FSDP": ("mfsdp", f.nothing, 0, set()),
        "healthy, NVFP4": ("nvfp4", f.nothing, 0, set()),
        "healthy, delayed": ("delayed", f.nothing, 0, set()),
        "healthy, experts": ("moe", f.nothing, 0, set()),
    }  # fmt: skip


def found(name: str, moment: int | None = None) -> dict[str, Any]:
    """What the audits of two processes name. moment: the step after which the fault is planted; None: the case's own."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny
    from tests.observe.audit.catalogue import ENGINES

    engine_name, plant, at, wanted = cases()[name]
    at = at if moment is None else moment
    kind, sections = ENGINES[engine_name]
    with device_layer(False):  # also in between the steps: each would enter and leave it otherwise
        return _run(build_engine(tiny.run(kind, world=2, **sections)), plant, at, wanted)


def _run(engine: Any, plant: Callable[[Any], None], at: int, wanted: set[str]) -> dict[str, Any]:
    from mpbridge.observe.audit import AuditHook
    from tests.backend.engines import tiny

    engine.undo = []
    hook = AuditHook(mode="warn", every=2 if at < LATE else LATE + 1, invariants=1)
    training = SimpleNamespace(engine=engine)
    from megatron.core import parallel_state

    # the stages of a pipeline read the same batches
    size = parallel_state.get_data_parallel_world_size()
    micro = 4 // size  # as tiny's run says: eight samples, two at a time
    batches = tiny.batches(rank=parallel_state.get_data_parallel_rank(), size=size)
    hook.built(training)
    for step in range(at + 2):
        if step == at:
            plant(engine)
        if step == 0:
            hook.started(training)
        hook.stepping(training)
        hook.stepped(training, engine.train_step(batches, microbatches=micro))
    hook.closed()
    engine.close()
    named = sorted({subject for one in hook.history for subject, fact in one["facts"].items() if fact[2] == "NO"})
    texts = [text for one in hook.history for text in one.get("faults", ())]
    return {"named": named, "texts": texts, "wanted": sorted(wanted)}


QUICK = (
    "never reduced, sharded", START, "parameters not gathered", "rank 1's shard frozen", "rank 1's FSDP2 shard frozen",
    "rank 1's main weight one ulp apart", "rank 1's moment one ulp apart", "rank 1's rotary frequencies", "rank 1's rate",
    "rank 1's embedding gradient through FP16", "rank 1 rounds by another seed", "tensor-parallel ranks sum in FP16",
    "healthy, sequence parallel", "amaxes not reduced", "experts' gradients halved", "healthy, experts apart", "healthy, FSDP2",
    "healthy, sharded", "more travels between stages", "healthy, pipeline",
)  # fmt: skip
"""What the default suite plants."""


def moments(name: str) -> tuple[int | None, ...]:
    """Before the first step, after it, and late; a run without a fault is gone through once, as long as the longest."""
    if not cases()[name][3]:
        return (LATE,)
    unborn = name in ("rank 1's scales frozen", "rank 1's moment one ulp apart")
    return (None,) if name == START else (1, LATE) if unborn else (0, 1, LATE)


def main(out: Path, *, quick: bool, first: int = 0) -> None:
    """One rank."""
    import torch.distributed as dist

    from mpbridge.backend.engines.parallel import start_process_group

    start_process_group(False)
    report = {}
    for name in QUICK if quick else list(cases())[first:]:
        for moment in (None,) if quick else moments(name):
            key = name if moment is None else f"{name} (after step {moment})"
            report[key] = found(name, moment)
            print(key, report[key]["named"], flush=True) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    begin = int(next((word for word in sys.argv[2:] if word.isdigit()), "0"))
    main(Path(sys.argv[1]), quick="quick" in sys.argv, first=begin)
