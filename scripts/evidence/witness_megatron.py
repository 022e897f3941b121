"""megatron-core's objects in a loop like Megatron-LM's, configured as its flags or Megatron Bridge's recipes configure them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch

from mpbridge.backend.megatron import inside_fsdp
from mpbridge.observe.witnessing.report import Witnessed
from mpbridge.observe.witnessing.witness import witness
from scripts.evidence.witness_common import BF16, VOCABULARY, Case, tokens

Wrapper = Literal[
    "ddp", "distributed", "overlapped", "torch_fsdp2", "megatron_fsdp", "megatron_fsdp_gradients", "megatron_fsdp_unsharded"
]  # fmt: skip


def megatron(
    *,
    wrapper: Wrapper = "ddp",
    half: torch.dtype = BF16,
    reduce_in_fp32: bool = True,
    policy: str | None = None,
    spoil: Callable[[Any, Any], None] = lambda wrapped, optimizer: None,
    spec: Callable[[], Any] | None = None,
    more: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Witnessed:
    """megatron-core's objects with the facts that `--bf16` sets in Megatron-LM's validate_args: BF16 parameters, accumulate_allreduce_grads_in_fp32.

    spoil: gets the wrapped model and the optimizer before the first step. spec: a layer's spec; None: megatron-core's local modules. more: fields of the
    TransformerConfig; optimizer: fields of the OptimizerConfig.
    """
    from mpbridge.backend.devices import device_layer

    with device_layer(spec is not None):  # a played machine answers for itself
        made = _Loop(wrapper, half, reduce_in_fp32, spec, more or {}, optimizer or {})
        spoil(made.wrapped, made.optimizer)
        seen = witness(made.wrapped, made.optimizer, policy, at={2})
        with inside_fsdp.indexed_device(False) if wrapper.startswith("megatron_fsdp") else contextlib.nullcontext():
            for step in range(2):
                with seen.step():
                    made.step(step)
            if wrapper.startswith("megatron_fsdp"):
                inside_fsdp.settle(made.wrapped)
        return seen.report


class _Loop:
    """Model, wrapper, optimizer and schedule."""

    def __init__(
        self,
        wrapper: Wrapper,
        half: torch.dtype,
        reduce_in_fp32: bool,
        spec: Callable[[], Any] | None,
        more: dict[str, Any],
        optimizer: dict[str, Any],
    ) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        flags = {"bf16": half is BF16, "fp16": half is torch.float16, "params_dtype": half}
        fields = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "transformer_impl": "local"}
        fields |= {"transformer_impl": "transformer_engine"} if spec else {}
        config = TransformerConfig(use_cpu_initialization=True, pipeline_dtype=half, **fields | flags | more)
        layer = spec() if spec else get_gpt_layer_local_spec()
        model = GPTModel(config=config, transformer_layer_spec=layer, vocab_size=VOCABULARY, max_sequence_length=16)
        self.wrapped = _WRAPPERS[wrapper](config, Float16Module(config, model), reduce_in_fp32)
        sharded = wrapper in ("distributed", "overlapped") or wrapper.startswith("megatron_fsdp")
        optimizer = optimizer | ({"overlap_param_gather": True} if wrapper == "overlapped" else {})
        scale = {"initial_loss_scale": 256.0, "min_loss_scale": 1.0} if half is torch.float16 else {}
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-3, use_distributed_optimizer=sharded, clip_grad=1.0, **flags, **scale, **optimizer),
            [self.wrapped],
        )
        config.grad_scale_func, config.finalize_model_grads_func = self.optimizer.scale_loss, finalize_model_grads

    def step(self, number: int) -> None:
        """Two micro-batches and an update."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(range(2 * number, 2 * number + 2)),
            model=self.wrapped,
            num_microbatches=2,
            seq_length=8,
            micro_batch_size=4,
            forward_only=False,
        )
        self.optimizer.step()


def _forward(batches: Iterator[int], chunk: Any) -> Any:
    batch = tokens(next(batches))
    mask = torch.ones(4, 1, 8, 8).triu(1).bool()
    out = chunk(batch, torch.arange(8).expand(4, 8), mask, labels=batch)
    return out, lambda losses: (losses.float().mean(), {})


def _ddp(config: Any, module: Any, reduce_in_fp32: bool, *, distributed: bool = False, **overlaps: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduce_in_fp32, use_distributed_optimizer=distributed, **overlaps
    )
    return DistributedDataParallel(config, ddp, module)


def _torch_fsdp2(config: Any, module: Any, reduce_in_fp32: bool) -> Any:
    import megatron.core.distributed.torch_fully_sharded_data_parallel as theirs
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig as Config,
    )

    real = theirs.DeviceMesh
    # it requests a mesh of CUDA devices by name
    theirs.DeviceMesh = SimpleNamespace(from_group=lambda group, kind: real.from_group(group, "cpu"))
    try:
        return theirs.TorchFullyShardedDataParallel(config, Config(reshard_after_forward=True), module)
    finally:
        theirs.DeviceMesh = real


def _megatron_fsdp(
    config: Any, module: Any, reduce_in_fp32: bool, strategy: str = "optim_grads_params", *, said: bool = True
) -> Any:
    """said: in the words that 0.17 and later read alone; Megatron-LM's flags do not set them by themselves."""
    from megatron.core.distributed import DistributedDataParallelConfig

    newer = {"megatron_fsdp_main_grads_dtype": torch.float32 if reduce_in_fp32 else None}
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduce_in_fp32,
        **(newer if said and hasattr(DistributedDataParallelConfig, *newer) else {}),
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # NCCL's
    )
    with inside_fsdp.indexed_device(False):
        wrapped = inside_fsdp.wrap(config, ddp, module, torch.device("cpu"))
    config.no_sync_func = wrapped.no_sync
    return wrapped


_WRAPPERS: dict[str, Callable[[Any, Any, bool], Any]] = {
    "ddp": _ddp,
    "distributed": lambda *args: _ddp(*args, distributed=True),
    "overlapped": lambda *args: _ddp(*args, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True),
    "torch_fsdp2": _torch_fsdp2,
    "megatron_fsdp": lambda *args: _megatron_fsdp(*args, said=False),
    "megatron_fsdp_gradients": lambda *args: _megatron_fsdp(*args, strategy="optim_grads"),
    "megatron_fsdp_unsharded": lambda *args: _megatron_fsdp(*args, strategy="no_shard"),
}


def since_017(run: Callable[[], Witnessed], *, holds: bool = True) -> Callable[[], Witnessed]:
    """The case if megatron-core is 0.17 or newer (holds=False: older). Raises ImportError otherwise."""

    def go() -> Witnessed:
        from mpbridge.common.probe import installed
        from mpbridge.precision.megatron_spec.versions import SINCE_017

        found = str(installed().megatron_core)
        if SINCE_017.holds(found) is not holds:
            raise ImportError(f"megatron-core {found}: it takes {'0.17 or newer' if holds else 'one before 0.17'}")
        return run()

    return go


CASES = (
    Case("megatron-lm", "DDP", megatron),
    Case("megatron-lm", "DDP", lambda: megatron(half=torch.float16, reduce_in_fp32=False), word="fp16"),
    Case("megatron-lm", "--use-distributed-optimizer", lambda: megatron(wrapper="distributed")),
    # before 0.17 its finalize_model_grads passes this wrapper an argument that it does not take
    Case("megatron-lm", "--use-torch-fsdp2", since_017(lambda: megatron(wrapper="torch_fsdp2")), several=True),
    Case("megatron-lm", "--use-megatron-fsdp", since_017(lambda: megatron(wrapper="megatron_fsdp")), several=True),
    Case(
        "megatron-lm",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params, megatron-core 0.16 (whose default divides nothing)",
        since_017(lambda: megatron(wrapper="megatron_fsdp"), holds=False),
        several=True,
    ),
    Case("megatron-bridge", "its recipes", lambda: megatron(wrapper="distributed"), word="bf16_mixed"),
    Case("megatron-bridge", "its performance recipes", lambda: megatron(wrapper="distributed", reduce_in_fp32=False)),
)
