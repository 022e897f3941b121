"""Loops around megatron-core's own objects in Megatron-LM's, Bridge's or a hand-written loop: its optimizers with its DistributedDataParallel, Megatron-FSDP, or torch's
`fully_shard` (--use-torch-fsdp2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.backend.devices.collectives import world_size
from mpbridge.backend.engines.contract import Live
from mpbridge.backend.megatron import inside_fsdp
from mpbridge.backend.megatron.inside_optimizer import main_weights, parts
from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.formats import plain
from mpbridge.common.traits import traits
from mpbridge.common.upstream import Replacement
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.numerics.observation.tensors import local
from mpbridge.observe.audit.gradients import core_ranks
from mpbridge.observe.audit.holdings import Held, groups_of, row_of
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.audit.traffic import Traffic, elements_into
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.witnessing.loops import Loop, LoopFacts, LoopRun, Update, neutral, shape_of, together
from mpbridge.observe.witnessing.plain import FSDP, NOBODY, Owned, copies_of, states
from mpbridge.observe.witnessing.sharded import first_element
from mpbridge.settings.schema import as_mapping
from mpbridge.settings.shape import live_parallel


class CoreLoop(Loop):
    """megatron-core's DistributedDataParallel with its own optimizers."""

    kind = traits("mcore")
    name = "mcore"
    foreign = False

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        super().__init__(model, optimizer, scaler=scaler, group=group)
        first = self.model[0]
        self.configs = SimpleNamespace(
            model=getattr(first, "config", None),
            optimizer=getattr(self._parts()[0], "config", None),
            ddp=getattr(first, "ddp_config", None),
        )
        # linears of mpbridge.numerics carry their own marker
        plugs = [getattr(m, "plug", None) for chunk in self.model for m in chunk.modules()]
        emulated = any(getattr(plug, "emulated", True) for plug in plugs if plug is not None)
        inputs = {name: _section(name, getattr(self.configs, name)) for name in ("model", "optimizer", "ddp")}
        self.run = LoopRun(policy=neutral(), facts=self.facts(), inputs=inputs, emulate=emulated)

    @property
    def words(self) -> str:  # type: ignore[override]
        """'megatron-core's DistributedDataParallel, DistributedOptimizer'."""
        return f"{self.wrapper}, {' and '.join(dict.fromkeys(type(one).__name__ for one in self._parts()))}"

    @property
    def wrapper(self) -> str:
        """What reduces gradients."""
        return f"megatron-core's {type(self.model[0]).__name__}"

    def _parts(self) -> list[Any]:
        return parts(self.optimizer)

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """The distributed optimizer shards its states."""
        return "optimizer" if any(hasattr(part, "shard_fp32_groups") for part in self._parts()) else "nothing"

    @property
    def shards_behind(self) -> bool:
        """Whether what other ranks update reaches this rank's parameters in the next forward pass only."""
        return bool(getattr(self.configs.ddp, "overlap_param_gather", False))

    @property
    def gathers_late(self) -> bool:
        """Whether all parameters follow an update in the next forward pass only: they lie outside of the buffer through which they are gathered."""
        return self.shards_behind and bool(getattr(self.configs.optimizer, "reuse_grad_buf_for_mxfp8_param_ag", False))

    def facts(self) -> LoopFacts:
        """The facts, from the live configs."""
        config = getattr(self._parts()[0], "config", None)
        model = getattr(self.model[0], "config", None)
        named = ((path, module) for chunk in self.model for path, module in chunk.named_modules())
        tied = any(getattr(m, "share_embeddings_and_output_weights", False) for c in self.model for m in c.modules())
        shape = shape_of(named, tied=tied)
        return LoopFacts(
            shape=replace(shape, num_layers=int(getattr(model, "num_layers", shape.num_layers))),
            parallel=live_parallel(model, world_size()),
            own_traits=self.kind,
            optimizer=OptimizerFacts(
                name=str(getattr(config, "optimizer", "adam")),
                distributed=self.sharded != "nothing",
                cpu_offload=bool(getattr(config, "optimizer_cpu_offload", False)),
                settings=_section("optimizer", config),
            ),
            ddp=_section("ddp", getattr(self.model[0], "ddp_config", None)),
        )

    def audit_ranks(self) -> tuple[int, ...]:
        """megatron-core's data-parallel group, including context-parallel ranks."""
        return core_ranks() if self.group is None else super().audit_ranks()

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Parameters by global name, with layers numbered over all pipeline stages."""
        from mpbridge.backend.engines.mcore import bare, parameters

        for chunk in self.model:
            yield from parameters(bare(chunk))

    def tensors(self) -> list[Live]:
        """The live tensors as megatron-core has them."""
        from mpbridge.backend.engines.mcore import live

        return live(self.model, self.optimizer)

    @property
    def loss_scale(self) -> float:
        """The scale of megatron-core's own scaler."""
        return float(self.optimizer.get_loss_scale())

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Hooks in after the optimizer's own `step`, which also copies main weights to the model, or after its last part if a loop calls the parts
        itself; gradients exist until the next step begins."""
        whole = [False]

        def begins() -> None:
            whole[0] = True

        def ready(result: Any) -> None:
            if not whole[0]:
                then(Update(applied=result is not False))

        def stepped(result: Any) -> None:
            whole[0] = False
            applied, norm = (result[0], result[1]) if isinstance(result, tuple) and len(result) > 1 else (result, None)
            then(Update(applied=applied is not False, norm=None if norm is None else float(norm)))

        undo = [around_call(self.outer, "step", before=begins, after=stepped)]
        if hasattr(self.outer, "step_with_ready_grads"):
            undo.append(around_call(self.outer, "step_with_ready_grads", after=ready))
        return together(*undo)


def around_call(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[Any], None] = lambda result: None,
) -> Callable[[], None]:
    """Calls `before` ahead of each call of `owner.name`, and `after` with its result; returns a function that removes the hook completely."""
    mine = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        result = mine(*args, **kwargs)
        after(result)
        return result

    replacement = Replacement(lambda: [(owner, name, call)])
    replacement.enter()
    return replacement.leave


def _section(name: str, config: Any) -> dict[str, Any]:
    """The values of a live config that differ from its class's defaults, in plain types; anything that is not data is omitted."""
    faults: list[str] = []
    found = {}
    for key, value in as_mapping(name, config, faults).items():
        try:
            found[key] = plain(value)
        except (ValueError, TypeError):
            continue
    return found


class _Sharded(CoreLoop):
    """Parameters sharded over the data-parallel ranks; gradients are copied into one buffer before they are sent."""

    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Shard sizes, and digests of what the forward pass read."""
        named = self.named_parameters()
        found = copies_of({name: (int(local(one).numel()), int(one.numel())) for name, one in named}, read)
        # a wrapper that shards nothing leaves every element on every rank
        return replace(found, shards={}) if self.sharded == "nothing" else found

    def audit_traffic(self, promised: dict[str, set[str]], watch: Watch, microbatches: int) -> Traffic:
        """Messages checked by number of elements."""
        group = self.audit_ranks()
        seen = Traffic(ranks=len(group), promised=promised)
        sizes = [int(parameter.numel()) for _, parameter in self.named_parameters()]
        elements_into(seen, watch, group, sizes, times={1, max(1, microbatches)})
        return seen


class CoreFsdpLoop(_Sharded):
    """Megatron-FSDP: the wrapper shards parameters and owns the main weights."""

    kind = traits("megatron_fsdp")
    name = "megatron_fsdp"

    @property
    def sharded(self) -> Sharded:  # type: ignore[override]
        """What is sharded, from the wrapper's strategy."""
        strategy = str(getattr(getattr(self.model[0], "ddp_config", None), "data_parallel_sharding_strategy", ""))
        known: Mapping[str, Sharded] = {"no_shard": "nothing", "optim": "optimizer", "optim_grads": "gradients"}
        return known.get(strategy, "everything")

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The sharded parameters that the optimizer updates."""
        return list(inside_fsdp.parameters(self.model[0]).items())

    def audit_holdings(self) -> Iterator[Held]:
        """Main shards and the model's own weights."""
        inner = (part.optimizer for part in self._parts())
        owned = {key: Owned(one, group) for one in inner for key, group in groups_of(one).items()}
        resting = inside_fsdp.resting(self.model[0])
        for name, parameter in self.named_parameters():
            mine = owned.get(id(parameter), NOBODY)
            shard = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
            begin = inside_fsdp.offset(self.model[0], name, parameter)[0] * row_of(parameter)
            yield mine.held(name, parameter, resting.get(name, shard.detach()), begin=begin)

    def tensors(self) -> Iterator[Live]:  # type: ignore[override]
        """The wrapper's buffers and the optimizer's states."""
        own = inside_fsdp.held(self.model[0])
        buffers = [Live(role=role, parameter=name, tensor=tensor) for role, name, tensor in own]
        yield from buffers
        held_in = {one.tensor.untyped_storage().data_ptr() for one in buffers if one.role == "grads"}
        for held in self.audit_holdings():
            grad = getattr(held.updated, "grad", None)
            inner = getattr(grad, "_local_tensor", grad)
            if inner is not None and inner.untyped_storage().data_ptr() not in held_in:
                yield Live(role="main_grads", parameter=held.name, tensor=inner)
            yield from states(held)


class CoreFsdp2Loop(_Sharded):
    """torch's `fully_shard` under megatron-core's Float16 optimizer: 16-bit shards, with FP32 copies that have their own gradients."""

    kind = replace(
        FSDP, name="core_fsdp2", summary="megatron-core's TorchFullyShardedDataParallel", main_weights="megatron_core"
    )
    name = "core_fsdp2"
    sharded: Sharded = "everything"
    wrapper = "megatron-core's TorchFullyShardedDataParallel"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self._grads: dict[str, torch.Tensor] = {}
        super().__init__(model, optimizer, scaler=scaler, group=group)
        # it has its own config class, without precision fields
        self.configs.ddp = None

    def audit_holdings(self) -> Iterator[Held]:
        """Every shard with its FP32 copy."""
        owned = {}
        for part in self._parts():
            groups = groups_of(part.optimizer)
            for model, copy in main_weights(part):
                owned[id(model)] = (Owned(part.optimizer, groups.get(id(copy))), copy)
        for name, parameter in self.named_parameters():
            mine, main = owned.get(id(parameter), (NOBODY, None))
            own, begin = local(parameter).detach().reshape(-1), first_element(name, parameter)
            yield Held(name, parameter, own, main, begin, mine.inner, mine.group, state=mine.state(main))

    def tensors(self) -> Iterator[Live]:  # type: ignore[override]
        """Shards, and the model's gradients as they were before megatron-core's step, which frees them."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=held.parameter.detach())
            if held.name in self._grads:
                yield Live(role="grads", parameter=held.name, tensor=self._grads[held.name])
            if held.updated is None:
                continue
            if held.updated is not held.parameter:
                yield Live(role="main_params", parameter=held.name, tensor=held.updated.detach())
                if held.updated.grad is not None:
                    yield Live(role="main_grads", parameter=held.name, tensor=held.updated.grad)
            yield from states(held)
        for chunk in self.model:
            for name, buffer in chunk.named_buffers():
                yield Live(role="buffers", parameter=inside_fsdp.bare_name(name), tensor=buffer)

    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """As for other megatron-core optimizers, but first records the gradients that it is about to copy."""
        self._grads = {}
        return together(around_call(self.outer, "step", before=self._accumulated), super().on_update(then))

    def _accumulated(self) -> None:
        """The accumulated gradients, without keeping them."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                grad = local(parameter.grad)
                self._grads[name] = torch.empty(grad.shape, dtype=grad.dtype, device="meta")
