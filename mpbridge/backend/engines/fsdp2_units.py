"""torch FSDP2 around a GPTModel: which modules form a unit, each unit's MixedPrecisionPolicy, and a reduce-scatter that counts what it sends."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.formats import DType
from mpbridge.precision.policy import PrecisionPolicy

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
except ImportError:
    raise Refused(
        f"engine=fsdp2 needs a torch whose FSDP2 takes a reduce-scatter of the caller's (2.13 and 2.15 do, 2.6 does not), found {torch.__version__}: "
        "install a newer torch, or use another engine"
    ) from None


def unit_policy(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """How a layer computes and reduces gradients.

    Inputs are not cast on entry: they are already in the compute dtype, and rotary angles must stay FP32 until their cosine is taken
    (a position of 1000 rounds to a multiple of 4 in BF16).
    """
    compute = policy.compute.torch()
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=policy.reduce.torch(),
        output_dtype=policy.output.torch(),
        cast_forward_inputs=False,
    )


def root_policy(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """As `unit_policy`, but the model's output is FP32 (as in megatron-core's Float16Module): a loss in BF16 has three digits."""
    return MixedPrecisionPolicy(
        param_dtype=policy.compute.torch(),
        reduce_dtype=policy.reduce.torch(),
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def fp32_policy(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """A module named by `keep_fp32`: parameters, arithmetic and reduction in FP32; its output is cast for the BF16 modules that follow."""
    return MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        output_dtype=policy.output.torch(),
        cast_forward_inputs=True,
    )


def refuse_mixed(kept: Mapping[torch.nn.Module, list[str]], names: Mapping[int, str]) -> None:
    """Raises BadValue for modules of which `keep_fp32` names some parameters but not others: a unit has one compute dtype."""
    faults = []
    for module, own in kept.items():
        rest = [name for name, _ in module.named_parameters(recurse=False) if name not in own]
        if rest:
            said = ", ".join(names[id(getattr(module, name))] for name in own)
            left = ", ".join(names[id(getattr(module, name))] for name in rest)
            faults.append(f"keep_fp32 names {said} and leaves {left} of the same module: name both or neither")
    if faults:
        raise BadValue("; ".join(faults))


class Reduced(ReduceScatter):
    """torch's own reduce-scatter, installed through FSDP2's interface for custom ones, which counts what it sends."""

    def __init__(self, seen: Counter[torch.dtype]) -> None:
        self.seen = seen
        """dtype -> elements of this rank's unsharded gradients. With one process nothing is sent and nothing is counted."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a buffer: first for the input, then for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Counts the elements and reduces."""
        self.seen[input_tensor.dtype] += input_tensor.numel()
        # looked up at each call, because the audit patches it to count; torch 2.13 warns about the old name
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return work


def store(model: torch.nn.Module, policy: PrecisionPolicy, kept: Mapping[torch.nn.Module, list[str]]) -> None:
    """Gives every parameter its resident dtype: the policy's, FP32 for those in `kept`. Buffers stay as megatron-core made them."""
    wide = {id(getattr(module, name)) for module, own in kept.items() for name in own}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in wide else policy.params.torch())


def _allow(kind: type[Any]) -> None:
    """Lets fully_shard accept modules of a class with an abstract base (megatron-core's routers).

    fully_shard gives a module a class with FSDPModule in front of its own. CPython then refuses the assignment, since the two classes have different
    object layouts. With FSDPModule behind the module's own class it is accepted, and torch looks into this table before it makes a class.
    """
    if issubclass(kind, ABC):
        cls_to_fsdp_cls.setdefault(kind, type(f"FSDP{kind.__name__}", (kind, FSDPModule), {}))


def shard(
    model: Any, policy: PrecisionPolicy, mesh: DeviceMesh, kept: Mapping[torch.nn.Module, list[str]]
) -> Counter[torch.dtype]:
    """Shards in place: modules kept in FP32, then each layer, then the rest. Returns the counter that the reductions fill."""
    seen: Counter[torch.dtype] = Counter()
    units: list[Any] = []
    if policy.compute is not DType.FP32:
        for module in kept:
            _allow(type(module))
        units += [fully_shard(module, mesh=mesh, mp_policy=fp32_policy(policy)) for module in kept]
    units += [fully_shard(layer, mesh=mesh, mp_policy=unit_policy(policy)) for layer in model.decoder.layers]
    units.append(fully_shard(model, mesh=mesh, mp_policy=root_policy(policy)))
    for unit in units:
        unit.set_custom_reduce_scatter(Reduced(seen))
    return seen


def data_mesh(group: dist.ProcessGroup, *, cuda: bool) -> DeviceMesh:
    """The one-dimensional mesh of a process group, on the training device."""
    return DeviceMesh.from_group(group, "cuda" if cuda else "cpu", mesh_dim_names=("shard",))
