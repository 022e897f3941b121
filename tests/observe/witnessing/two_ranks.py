"""Every kind of plain torch's loops under a witness, in two processes or, where shards are copied, in four; rank 0 writes {case: report} to the file
named first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.observe.witnessing.loops import AUTOCAST, Tiny, adam, train

BF16 = torch.bfloat16


def ddp(model: Any = None, **how: Any) -> Any:
    return DistributedDataParallel(Tiny() if model is None else model, **how)


def fsdp2(model: Any = None, *, mesh: Any = None, **dtypes: Any) -> Any:
    model, mesh = model or Tiny(), mesh or dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    return model


def fsdp2_summed() -> Any:
    """torchtitan's way: the loss is divided by the tokens of all ranks, and gradients are summed."""
    model = fsdp2(param_dtype=BF16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return run(model, "fp32_params_bf16_compute", micro=1)


def linears(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, torch.nn.Linear)


def fsdp1(
    *,
    original: bool = True,
    strategy: Any = ShardingStrategy.FULL_SHARD,
    model: Any = None,
    mesh: Any = None,
    **dtypes: Any,
) -> Any:
    return FullyShardedDataParallel(
        model or Tiny(),
        use_orig_params=original,
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(**dtypes) if dtypes else None,
        device_id=torch.device("cpu"),
        auto_wrap_policy=None if mesh else linears,
        device_mesh=mesh,
    )


def copies() -> Any:
    """Two copies of two shards."""
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def hybrid2(**dtypes: Any) -> Any:
    return fsdp2(mesh=copies(), **dtypes)


def hybrid1(**dtypes: Any) -> Any:
    return fsdp1(strategy=ShardingStrategy.HYBRID_SHARD, mesh=copies(), **dtypes)


def apart() -> Any:
    """Copies of a shard never average their gradients."""
    model = hybrid2(param_dtype=BF16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        module.set_requires_all_reduce(False)
    return run(model, "fp32_params_bf16_compute", micro=1)


def no_sync(model: Any) -> Callable[[bool], Any]:
    return lambda last: nullcontext() if last else model.no_sync()


def run(model: Any, policy: Any = None, **how: Any) -> Any:
    return train(model, adam(model), policy, **how)


def unreduced() -> Any:
    """Gradients never leave their rank."""
    model = ddp()
    return run(model, micro=1, unsync=lambda last: model.no_sync())


def summed() -> Any:
    """A communication hook that forgets to divide."""
    model = ddp()

    def hook(state, bucket):  # torch reads annotations, and takes no strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    return run(model, micro=1)


def narrow_wire() -> Any:
    """What torch's bf16_compress_hook does, which asks for NCCL."""
    model = ddp()

    def hook(state, bucket):
        narrow = bucket.buffer().to(BF16).div_(2)
        work = dist.all_reduce(narrow, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    model.register_comm_hook(None, hook)
    return run(model, AUTOCAST_CONFIG(), autocast=True)


def drifted() -> Any:
    """Rank 1 trains another model."""
    model = ddp()
    if dist.get_rank():
        model.module.head.weight.data[0, 0] += 0.5
    return run(model)


def frozen_on_one() -> Any:
    model = ddp()
    optimizer = adam(model)
    if dist.get_rank():
        kept = model.module.head.weight
        frozen = kept.detach().clone()

        def back(*_: Any) -> None:
            kept.data.copy_(frozen)

        optimizer.register_step_post_hook(back)
    return train(model, optimizer)


def AUTOCAST_CONFIG() -> Any:
    from mpbridge import MixedPrecisionConfig

    return MixedPrecisionConfig(**AUTOCAST)


CASES: dict[str, Callable[[], Any]] = {
    "ddp fp32": lambda: run(ddp(), "fp32"),
    "ddp autocast": lambda: run(ddp(), AUTOCAST_CONFIG(), autocast=True),
    "ddp bf16": lambda: run(ddp(Tiny().to(BF16)), "full_bf16"),
    "ddp tied": lambda: run(ddp(Tiny(tied=True)), "fp32"),
    "ddp no_sync": lambda: (model := ddp(), run(model, "fp32", unsync=no_sync(model), clip=0.1))[1],
    "fsdp2 defaults": lambda: run(fsdp2(param_dtype=BF16), None),
    "fsdp2 fp32 wire": lambda: run(fsdp2(param_dtype=BF16, reduce_dtype=torch.float32), "fp32_params_bf16_compute"),
    "fsdp2 summed": fsdp2_summed,
    "fsdp2 bf16": lambda: run(fsdp2(Tiny().to(BF16), param_dtype=BF16), "full_bf16"),
    "fsdp1": lambda: run(fsdp1(param_dtype=BF16, reduce_dtype=torch.float32), "fp32_params_bf16_compute"),
    "fsdp1 bf16 wire": lambda: run(fsdp1(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)),
    "fsdp1 flat": lambda: run(fsdp1(original=False, param_dtype=BF16, reduce_dtype=torch.float32), "fp32_params_bf16_compute"),
    "fsdp1 no_sync": lambda: (model := fsdp1(), run(model, "fp32", unsync=no_sync(model)))[1],
    "FAULT unreduced": unreduced,
    "FAULT summed": summed,
    "FAULT narrow wire": narrow_wire,
    "FAULT drifted": drifted,
    "FAULT frozen on one": frozen_on_one,
    "FAULT autocast off": lambda: run(ddp(), AUTOCAST_CONFIG()),
    "FAULT bf16 wire of fsdp2": lambda: run(fsdp2(param_dtype=BF16, reduce_dtype=BF16), "fp32_params_bf16_compute"),
    "FAULT no main weights": lambda: run(ddp(Tiny().to(BF16)), "bf16_mixed"),
}  # fmt: skip

WIDE_WIRE = {"param_dtype": BF16, "reduce_dtype": torch.float32}
FOUR: dict[str, Callable[[], Any]] = {
    "hybrid fsdp2": lambda: run(hybrid2(**WIDE_WIRE), "fp32_params_bf16_compute"),
    "hybrid fsdp2 bf16 wire": lambda: run(hybrid2(param_dtype=BF16, reduce_dtype=BF16)),
    "hybrid fsdp1": lambda: run(hybrid1(**WIDE_WIRE), "fp32_params_bf16_compute"),
    "FAULT copies apart": apart,
}


def core(wrapper: Any) -> Any:
    from scripts.evidence.witness_megatron import megatron

    return SimpleNamespace(report=megatron(wrapper=wrapper, policy="bf16_mixed"))


CORE = {
    f"core {wrapper}": partial(core, wrapper)
    for wrapper in ("distributed", "overlapped", "megatron_fsdp_gradients", "megatron_fsdp_unsharded")
}
"""Run only by name: they import megatron-core."""


def main() -> None:
    out, *wanted = sys.argv[1:]
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    cases = FOUR if dist.get_world_size() == 4 else CASES
    for name, case in (cases if not wanted else {name: (cases | CORE)[name] for name in wanted}).items():
        seen = case()
        found[name] = seen.report.as_data()
        if dist.get_rank() == 0 and out == "-":
            print("=====", name, flush=True)
            print(seen.report, flush=True)
    if dist.get_rank() == 0 and out != "-":
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
