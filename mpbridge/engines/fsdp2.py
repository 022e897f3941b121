"""The FSDP2 engine: torch's fully_shard with a real MixedPrecisionPolicy around megatron-core's GPTModel, on CUDA or on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from mpbridge.devices import device_layer
from mpbridge.engines.contract import Batch, Live, StepResult
from mpbridge.engines.optimizers import CpuFusedAdam
from mpbridge.errors import Refused

if TYPE_CHECKING:
    from mpbridge.config.container import Run

ONLY_ONE = ("tensor", "pipeline", "context", "expert")


def refuse(run: Run) -> None:
    """Raises Refused with everything about `run` that this engine would not do as asked."""
    sizes, policy = run.facts.parallel, run.policy
    faults = [
        f"{name} parallelism of {getattr(sizes, name)}: only data parallelism here, set it to 1"
        for name in ONLY_ONE
        if getattr(sizes, name) > 1
    ]
    if policy.stored:
        faults.append("weights stored in FP8 or FP4: FSDP2 shards 16- and 32-bit parameters; set fp8_param_gather=false")
    if policy.autocast is not None:
        faults.append("torch autocast beside FSDP2's own casts: set autocast_enabled=false")
    if policy.params.bytes < policy.compute.bytes:
        faults.append(
            f"{policy.params.short} storage under {policy.compute.short} compute: gradients and states would stay {policy.params.short} while compute costs "
            f"{policy.compute.short}; set params_dtype={policy.compute.short}"
        )
    if run.inputs["ddp"].get("use_distributed_optimizer"):
        faults.append("ddp.use_distributed_optimizer: FSDP2 shards the states itself; drop it")
    if faults:
        raise Refused("\n".join(["this run cannot go on FSDP2:", *(f"  - {fault}" for fault in faults)]))


class Fsdp2Engine:
    """GPTModel in fully_shard units, stepped by megatron-core's schedule, updated by torch's AdamW or FusedAdam on the local shards."""

    name = "fsdp2"

    def __init__(self, run: Run, *, cuda: bool) -> None:
        self.run = run
        self.cuda = cuda
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.configs: Any = None
        self.reduced: Counter[torch.dtype] = Counter()
        """dtype -> gradient elements that went into reduce-scatters so far: what was on the wire, counted on FSDP2's own interface."""
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._parallel: Any = None

    def _layer(self) -> AbstractContextManager[None]:
        return device_layer(self.cuda, fused_adam=None if self.cuda else CpuFusedAdam)

    @classmethod
    def build(cls, run: Run, *, backend: Any = None) -> Self:
        """The engine of `run`, inside an active device layer and an initialised process group.

        backend: from a TransformerConfig to a BackendSpecProvider, where other linears are wanted (emulation); None: the device's own.
        Raises Refused with every reason why not, BadValue for `keep_fp32` globs that match nothing or cannot be isolated.
        """
        refuse(run)
        engine = cls(run, cuda=torch.cuda.is_available())
        try:
            with engine._layer():
                engine._build(backend)
        except BaseException:
            engine.close()
            raise
        return engine

    def _build(self, backend: Any) -> None:
        from megatron.core import parallel_state

        from mpbridge.engines.fsdp2_units import data_mesh, refuse_mixed, shard, store
        from mpbridge.engines.model import fp32_modules, global_names
        from mpbridge.engines.parallel import ModelParallel
        from mpbridge.engines.plain_model import plain_model
        from mpbridge.engines.shard_optimizer import ShardOptimizer

        self.configs = _targets(self.run, cuda=self.cuda)
        self._parallel = ModelParallel(self.run.facts.parallel, seed=int(self.run.train.get("seed", 1234)))
        config, policy = self.configs.model, self.run.policy
        config.gradient_accumulation_fusion = False  # it writes into megatron-core's own gradient buffers, and there are none
        model = plain_model(config, self.configs.gpt, policy, cuda=self.cuda, backend=backend)
        kept = fp32_modules(model, policy.keep_fp32)
        names = global_names(model)
        refuse_mixed(kept, {id(parameter): names[name] for name, parameter in model.named_parameters()})
        store(model, policy, kept)
        if self.cuda:
            model.cuda(torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.reduced = shard(model, policy, data_mesh(group, cuda=self.cuda), kept)
        self.model = [model]
        self.optimizer = ShardOptimizer(dict(model.named_parameters()), policy, self.configs.optimizer, group, cuda=self.cuda)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = _finalize
        if policy.reduce.bytes > policy.params.bytes:
            # what earlier micro-batches leave behind then accumulates unsharded in the reduction's dtype; a shard would be in the storage's
            config.no_sync_func = partial(_unsynced, model)

    def train_step(self, batches: Iterator[Batch], *, microbatches: int) -> StepResult:
        """Forward, backward and update over `microbatches` micro-batches of this data-parallel rank."""
        from mpbridge.engines.steps import learning_rate

        with self._layer():
            self.model[0].train()
            self.optimizer.zero_grad()
            scale, lr = self.optimizer.get_loss_scale(), learning_rate(self.optimizer)
            loss = self._schedule(batches, microbatches, forward_only=False)
            applied, norm = self.optimizer.step()
            return StepResult(loss=loss, applied=applied, grad_norm=norm, loss_scale=scale, lr=lr)

    def evaluate(self, batches: Iterator[Batch], *, microbatches: int) -> float:
        """Mean loss in nats a token over the micro-batches and the data-parallel group; nothing is updated."""
        with self._layer(), torch.no_grad():
            self.model[0].eval()
            loss = self._schedule(batches, microbatches, forward_only=True)
            self.model[0].reshard()  # the root unit stays gathered for a backward pass that does not come
            return loss

    def _schedule(self, batches: Iterator[Batch], microbatches: int, *, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mpbridge.engines.parallel import mean_over_data
        from mpbridge.engines.steps import forward_step

        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, self._device),
            data_iterator=batches,
            model=self.model[0],
            num_microbatches=microbatches,
            seq_length=self.run.facts.shape.seq_length,
            micro_batch_size=self.run.facts.micro_batch_size,
            forward_only=forward_only,
        )
        return float(mean_over_data(torch.stack(losses).mean()))

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Sharded parameters (DTensors) of this rank by their global name."""
        return list(self.optimizer.names.items()) if self.optimizer is not None else []

    def tensors(self) -> Iterable[Live]:
        """Every tensor that plays a role, as it exists now: local shards."""
        from mpbridge.engines.shard_state import live_shards

        return live_shards(self.model[0], self.optimizer)

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """Sharded state dict: 'model' as stored, 'optimizer' with main weights and moments in FP32 whatever the recipe stores, and the loss scaler."""
        from mpbridge.engines.shard_state import optimizer_state, parameter_state

        with self._layer():
            return {"model": parameter_state(self.optimizer), "optimizer": optimizer_state(self.optimizer, loading=loading)}

    def load_state(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Takes back what `state` described; optimizer=False: weights only, main weights rebuilt from them."""
        from mpbridge.engines.shard_state import load_optimizer, load_parameters

        with self._layer():
            load_parameters(self.optimizer, state["model"])
            if optimizer:
                load_optimizer(self.optimizer, state["optimizer"])

    def close(self) -> None:
        """Frees tensors and megatron-core's process-wide parallel state, so that another engine can be built."""
        with self._layer():
            self.model, self.optimizer, self.configs = [], None, None
            if self._parallel is not None:
                self._parallel.stop()
                self._parallel = None


def _targets(run: Run, *, cuda: bool) -> Any:
    from mpbridge.engines.configs import build_targets, sections

    inputs = sections(run, cuda=cuda)
    # megatron-core 0.16.1 accepts state dtypes only beside its distributed optimizer; here nobody else reads the flag
    inputs["optimizer"]["use_distributed_optimizer"] = bool(run.policy.precision_aware)
    return build_targets(run, cuda=cuda, inputs=inputs)


@contextmanager
def _unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _finalize(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
    """What is left of megatron-core's finalize_model_grads where nothing but data is parallel: the routers' load-balancing biases."""
    config = chunks[0].config
    if getattr(config, "moe_router_enable_expert_bias", False):
        from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

        _update_router_expert_bias(chunks, config)
