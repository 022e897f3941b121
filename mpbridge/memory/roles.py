"""What is kept on a rank, in which dtype, how many elements, by whom: one truth for memory, audit and fingerprint."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import NamedTuple

from mpbridge.facts import RunFacts
from mpbridge.formats import DType
from mpbridge.memory.buckets import Buffer, buffers
from mpbridge.memory.layers import Parameter, parameters
from mpbridge.memory.ranks import Coordinates
from mpbridge.memory.weight_copies import weight_copies
from mpbridge.precision.policy import PrecisionPolicy, Quant


class Role(NamedTuple):
    """One kind of tensor of one parameter (or of all that share a buffer) on one rank."""

    name: str
    """'params', 'grads', 'main_params', 'main_grads', 'exp_avg', 'exp_avg_sq', 'buffers', 'padding', 'weight_copies', 'weight_transposes', 'weight_scales'."""
    parameter: str
    """Global name; '' where many parameters share it."""
    dtype: DType
    """As stored: FP8 and FP4 are UINT8."""
    elements: int
    """On this rank, in units of `dtype`, padding not counted."""
    padding: int
    """Elements that hold nothing."""
    owner: str
    """'model', 'wrapper', 'engine', 'optimizer' or 'transformer_engine': who allocates it."""

    @property
    def bytes(self) -> int:
        """What it occupies."""
        return (self.elements + self.padding) * self.dtype.bytes


def roles(policy: PrecisionPolicy, run: RunFacts, *, rank: int = 0) -> tuple[Role, ...]:
    """Every role on `rank`, as it is between two optimizer steps once states exist. Views of other roles' memory are not listed.

    Exact for megatron-core's DDP and distributed optimizer, and for torch FSDP2; Megatron-FSDP's own alignment is not modelled (see `exact`).
    """
    settled = policy.settled(dict(run.optimizer.settings))
    at = Coordinates.of(rank, run.parallel)
    chunks = parameters(run, at)
    if run.engine == "mcore":
        found = [role for index, chunk in enumerate(chunks) for role in _mcore(settled, run, at, chunk, index)]
    else:
        from mpbridge.memory.roles_sharded import fsdp2, megatron_fsdp

        shard = fsdp2 if run.engine == "fsdp2" else megatron_fsdp
        found = [role for chunk in chunks for role in shard(settled, run, at, chunk)]
    found += [role for chunk in chunks for role in _module_buffers(settled, run, chunk)]
    return tuple(found)


def exact(run: RunFacts) -> bool:
    """Whether `roles` gives live bytes to the byte, as tests with live tensors show, or leaves out an engine's own alignment."""
    return run.engine != "megatron_fsdp"


def dtype_at_rest(policy: PrecisionPolicy, run: RunFacts, parameter: Parameter) -> tuple[DType, Quant | None]:
    """(dtype of the stored parameter, the quantization of its GEMM): UINT8 when its weight rests in FP8."""
    if any(fnmatch.fnmatchcase(parameter.name, pattern) for pattern in policy.keep_fp32):
        return DType.FP32, None
    weight = parameter.weight
    if parameter.layer is None or not weight.linear or not policy.quantized or run.realization != "native":
        return policy.params, None
    path = parameter.name.removesuffix(weight.path) + weight.module
    quant = next(iter(policy.of_path(path, run.shape.num_layers).distinct), None)
    return (DType.UINT8 if quant is not None and quant.stored else policy.params), quant


def fused_keeps_main(policy: PrecisionPolicy, run: RunFacts) -> bool:
    """Whether FusedAdam keeps the main weights: megatron-core's use_precision_aware_optimizer_no_fp8_or_ds_fp8 (optimizer_config.py)."""
    lower = (policy.main_params or DType.FP32) is not DType.FP32
    return bool(policy.precision_aware) and (
        lower or policy.fp8 is None or policy.fp8.row.history or run.optimizer.cpu_offload
    )


def grads_dtype(policy: PrecisionPolicy, at_rest: DType) -> DType:
    """dtype of a parameter's gradient buffer: FP32, or the parameter's own (its 16-bit face where it rests in FP8)."""
    if policy.reduce is DType.FP32:
        return DType.FP32
    return policy.params if at_rest is DType.UINT8 else at_rest


def _mcore(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunk: tuple[Parameter, ...], index: int
) -> Iterator[Role]:
    rows, quants = [], []
    for parameter in chunk:
        at_rest, quant = dtype_at_rest(policy, run, parameter)
        rows.append((parameter, at_rest, grads_dtype(policy, at_rest)))
        if quant is not None:
            quants.append((parameter, quant))
    reused = policy.reuse_grad_buffer and run.realization == "native"
    for buffer in buffers(run, rows, stage=at.stage, index=index):
        yield from _buffer(policy, run, buffer, shared=reused and buffer.params is DType.UINT8)
        if buffer.distributed:
            shard = at.expert_data if _apart(run, buffer) else at.data
            yield from _states(policy, run, buffer, buffer.shard(shard % buffer.group))
        else:
            yield from _states(policy, run, buffer, ((slot.parameter, slot.end - slot.start) for slot in buffer.slots))
    for parameter, quant in quants:
        yield from (Role(*copy, 0, "transformer_engine") for copy in weight_copies(parameter, quant, run))


def _apart(run: RunFacts, buffer: Buffer) -> bool:
    return run.parallel.expert > 1 and buffer.slots[0].parameter.weight.expert


def _buffer(policy: PrecisionPolicy, run: RunFacts, buffer: Buffer, *, shared: bool) -> Iterator[Role]:
    """Parameters and gradients. shared: MXFP8 weights, whose gather borrows the gradient buffer: their bytes are Transformer Engine's own copies."""
    for slot in buffer.slots:
        size, name = slot.end - slot.start, slot.parameter.name
        if not shared:
            yield Role("params", name, buffer.params, size, 0, "wrapper" if buffer.distributed else "model")
        yield Role("grads", name, buffer.grads, size, 0, "wrapper")
    if buffer.padding:
        kept = (buffer.grads,) if shared else (buffer.params, buffer.grads)
        yield from (Role("padding", "", dtype, 0, buffer.padding, "wrapper") for dtype in kept)


def _states(
    policy: PrecisionPolicy, run: RunFacts, buffer: Buffer, owned: Iterator[tuple[Parameter, int]]
) -> Iterator[Role]:
    """Main weights, main gradients and moments of what this rank updates."""
    fused = fused_keeps_main(policy, run)
    wide = buffer.params is DType.FP32
    # 16-bit parameters that are their own main copy leave FP32 nowhere (megatron-core's FP32Optimizer over them; DDP only)
    own = policy.own_main_copy and not wide and not buffer.distributed
    main = main_dtype(policy, buffer.params) if fused else DType.FP32
    adam = run.optimizer.name != "sgd"
    aware = bool(policy.precision_aware)
    first = (policy.exp_avg or DType.FP32) if aware else (buffer.params if own else DType.FP32)
    second = (policy.exp_avg_sq or DType.FP32) if aware else first
    copied = buffer.grads is not DType.FP32 and not fused and not own
    momentum = adam or bool(run.optimizer.settings.get("sgd_momentum", 0.9))
    for parameter, size in owned:
        name = parameter.name
        if fused or not (wide or own):
            yield Role("main_params", name, main, size, 0, "optimizer" if fused else "engine")
        if copied:
            yield Role("main_grads", name, DType.FP32, size, 0, "engine")
        if momentum:
            yield Role("exp_avg", name, first, size, 0, "optimizer")
        if adam:
            yield Role("exp_avg_sq", name, second, size, 0, "optimizer")


def main_dtype(policy: PrecisionPolicy, at_rest: DType) -> DType:
    """How FusedAdam stores main weights: INT16 remainders of BF16 parameters, else their own dtype (fused_adam.py)."""
    wanted = policy.main_params or DType.FP32
    return DType.INT16 if policy.remainders and at_rest is DType.BF16 and wanted is DType.FP32 else wanted


def _module_buffers(policy: PrecisionPolicy, run: RunFacts, chunk: tuple[Parameter, ...]) -> Iterator[Role]:
    """Buffers of the router: how many tokens each expert got and, FP32 again from the first forward pass on, the bias that balances them."""
    if not run.shape.expert_bias:
        return
    for parameter in chunk:
        if parameter.weight.path.endswith("mlp.router.weight"):
            prefix = parameter.name.removesuffix("weight")
            yield Role("buffers", f"{prefix}expert_bias", DType.FP32, run.shape.experts or 0, 0, "model")
            yield Role("buffers", f"{prefix}local_tokens_per_expert", policy.params, run.shape.experts or 0, 0, "model")
