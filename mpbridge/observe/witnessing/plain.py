"""Loops of plain torch: one process, DistributedDataParallel, FSDP1, FSDP2; with torch's optimizers, Transformer Engine's, or any that has groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.backend.engines.contract import Live
from mpbridge.common.facts import STATE_ROLES, OptimizerFacts, Parallel
from mpbridge.common.traits import EngineTraits, traits
from mpbridge.numerics.observation.modules import bare
from mpbridge.numerics.observation.tensors import digest, local, sample
from mpbridge.observe.audit.flags import inner_optimizers, optimizer_faults
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.orthogonal import trains
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.audit.traffic import Traffic, buffers_into, elements_into
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.witnessing.loops import Loop, LoopFacts, Update, shape_of, together

DDP = EngineTraits(
    name="torch", engine="", label="torch", summary="torch's own module, alone or in DistributedDataParallel, updated by a torch optimizer",
    layout="whole", distributed_optimizer="never", main_weights="optimizer", optimizers=("adam", "torch_adamw", "sgd"), wide_storage=True, checkpoints="",
)  # fmt: skip
FSDP = replace(traits("fsdp2"), rules="", checkpoints="")
"""FSDP1 keeps the same tensors as FSDP2, sharded differently."""


@dataclass(frozen=True, slots=True)
class Owned:
    """One tensor in one group of one optimizer."""

    inner: Any
    group: dict[str, Any] | None
    owners: int = 1
    """Optimizers that have updated it in the observed step."""

    def state(self, tensor: Any) -> dict[str, Any]:
        """The optimizer's state of the tensor; empty if no optimizer has it."""
        return {} if self.inner is None else dict(self.inner.state.get(tensor, {}))

    def held(self, name: str, parameter: Any, part: torch.Tensor, **more: Any) -> Held:
        """A parameter that the optimizer updates as it is."""
        own = {"inner": self.inner, "group": self.group, "owners": self.owners, "state": self.state(parameter)}
        return Held(name, parameter, part.reshape(-1), parameter, **own, **more)


NOBODY = Owned(None, None)
"""In the place of a tensor that is in no optimizer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of one parameter, in a tensor that may hold several."""

    name: str
    owner: Any
    """The tensor that the optimizer has."""
    start: int
    """First element in `owner`, flat."""
    count: int
    begin: int
    """First element in the whole parameter, flat."""
    whole: int
    """Elements of the whole parameter."""
    stored: torch.Tensor | None = None
    """The same elements as the model keeps them, flat; None: it keeps them in `owner`."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This part of a tensor that has as many elements as `owner`."""
        return flat.reshape(-1)[self.start : self.start + self.count]

    def held(self, parameter: Any, mine: Owned, **more: Any) -> Held:
        """The part with the optimizer that updates it; states of another shape (a step counter) stay whole."""
        updated = self.of(self.owner.detach())
        states = {
            key: self.of(value) if isinstance(value, torch.Tensor) and value.shape == self.owner.shape else value
            for key, value in mine.state(self.owner).items()
        }
        part, whole = updated if self.stored is None else self.stored, self.whole
        owner = {"inner": mine.inner, "group": mine.group, "state": states}
        return Held(self.name, parameter, part, updated, begin=self.begin, elements=whole, **owner, **more)


class TorchLoop(Loop):
    """Whole parameters on every rank: no wrapper, torch's DistributedDataParallel, or megatron-core's under a torch optimizer."""

    kind = DDP
    name = "torch"

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self.inner = inner_optimizers(optimizer)
        self._stepped: set[int] = set()
        """Which of several optimizers have stepped in the observed step, by identity."""
        self._gradients_read: dict[int, dict[int, float]] = {}
        """Parameter, by identity -> its gradient, sampled when its own one of several optimizers had read it."""
        super().__init__(model, optimizer, scaler=scaler, group=group)
        self._frozen = {id(one) for chunk in self.model for one in chunk.parameters() if not one.requires_grad}
        """Parameters, by identity, that were frozen when the witness was made: an optimizer that holds them passes them over."""
        self.optimizer = SimpleNamespace(
            optimizer=None,
            chained_optimizers=self.inner,
            param_groups=[group for inner in self.inner for group in inner.param_groups],
            grad_scaler=scaler,
            get_loss_scale=lambda: self.loss_scale,
        )

    @property
    def words(self) -> str:  # type: ignore[override]
        """'DistributedDataParallel, AdamW'."""
        return f"{self.wrapper}, {' and '.join(dict.fromkeys(type(one).__name__ for one in self.inner))}"

    @property
    def wrapper(self) -> str:
        """What reduces gradients."""
        for chunk in self.model:
            for module in chunk.modules():
                if type(module).__name__ == "DistributedDataParallel":
                    mine = type(module).__module__.startswith("megatron")
                    return "megatron-core's DistributedDataParallel" if mine else "torch DistributedDataParallel"
        return "torch without a wrapper" if len(self.audit_ranks()) == 1 else "torch, wrapped elsewhere"

    def facts(self) -> LoopFacts:
        """The facts: the number of layers from parameter names; Adam unless an optimizer is named SGD, Muon, SOAP or Lion."""
        names = [type(one).__name__ for one in self.inner]
        modules = ((bare(path), module) for chunk in self.model for path, module in chunk.named_modules())
        held = [id(parameter) for _, parameter in self.model[0].named_parameters(remove_duplicate=False)]
        beside = next((kind for one in self.inner if (kind := trains(one)) != "adam"), "adam")
        name = "sgd" if all("SGD" in one for one in names) else beside
        return LoopFacts(
            shape=shape_of(modules, tied=len(set(held)) < len(held)),
            parallel=Parallel(world_size=len(self.audit_ranks())),
            own_traits=self.kind,
            optimizer=OptimizerFacts(name=name, settings={"sgd_momentum": self.largest("momentum")}),
        )

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Parameters by cleaned name, each tensor once."""
        found: dict[int, tuple[str, Any]] = {}
        for chunk in self.model:
            for name, parameter in chunk.named_parameters():
                found.setdefault(id(parameter), (bare(name), parameter))
        return list(found.values())

    # --- who keeps what ------------------------------------------------------------------------------------------------------------------
    def _owned(self) -> dict[int, Owned]:
        """By identity of the tensor. Two optimizers may take turns with one: it belongs to the one that stepped, or to both if both did."""
        found: dict[int, Owned] = {}
        for inner in sorted(self.inner, key=lambda one: id(one) in self._stepped):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    first = found.get(id(parameter))
                    twice = first is not None and {id(first.inner), id(inner)} <= self._stepped
                    found[id(parameter)] = Owned(inner, group, 1 + twice)
        return found

    def audit_holdings(self) -> Iterator[Held]:
        """Every parameter with the optimizer that updates it."""
        owned = self._owned()
        for name, parameter in self.named_parameters():
            mine = owned.get(id(parameter), NOBODY)
            if not parameter.requires_grad and (mine is NOBODY or id(parameter) in self._frozen):
                yield Held(name=name, parameter=parameter)
                continue
            rests = bool(self._stepped) and mine is not NOBODY and id(mine.inner) not in self._stepped
            # a torch optimizer reads only `.grad`, regardless of where a wrapper accumulates gradients
            samples = {} if _past_the_optimizer(parameter) else self._gradients_read.get(id(parameter))
            begin, part = self._begin(name, parameter), local(parameter).detach()
            yield mine.held(name, parameter, part, begin=begin, rests=rests, samples=samples)

    def unobserved(self) -> Mapping[str, str]:
        """Gradients that no optimizer can read."""
        lost = any(_past_the_optimizer(parameter) for _, parameter in self.named_parameters())
        why = "gradients are in main_grad, but this optimizer reads .grad, which is empty"
        return {"optimizer_reads": why} if lost else {}

    def _begin(self, name: str, parameter: Any) -> int:
        return 0

    def tensors(self) -> Iterator[Live]:
        """Parameters, buffers, accumulated gradients and the optimizer's states."""
        for held in self.audit_holdings():
            yield Live(role="params", parameter=held.name, tensor=held.parameter.detach())
            grad = getattr(held.parameter, "main_grad", None)
            grad = held.parameter.grad if grad is None else grad
            if grad is not None:
                yield Live(role="grads", parameter=held.name, tensor=grad)
            yield from states(held)
        yield from self._buffers()

    def _buffers(self) -> Iterator[Live]:
        for chunk in self.model:
            for name, buffer in chunk.named_buffers():
                yield Live(role="buffers", parameter=bare(name), tensor=buffer)

    # --- the audit's questions -----------------------------------------------------------------------------------------------------------
    def audit_copies(self, read: Mapping[str, int] | None) -> Copies:
        """Digests of whole parameters."""
        return Copies(whole={(name, 0, 0): digest(parameter) for name, parameter in self.named_parameters()})

    def audit_traffic(self, promised: dict[str, set[str]], watch: Watch, microbatches: int) -> Traffic:
        """Reductions over this loop's ranks: megatron-core's buffers by address, others by number of elements."""
        group = self.audit_ranks()
        seen = Traffic(ranks=len(group), promised=promised)
        if all(hasattr(chunk, "bucket_groups") for chunk in self.model):
            names = {id(parameter): name for name, parameter in self.named_parameters()}
            buffers_into(self.model, names, watch, seen)
            return seen
        named = self.named_parameters()
        # frameworks choose whether to reduce each micro-batch or all of them at the end; `gradients` verifies by value that the result is one mean
        sizes = [self._size(name, parameter) for name, parameter in named if parameter.requires_grad]
        whole = sum(self._size(name, parameter) for name, parameter in named) if self.sharded == "everything" else 0
        times = {1, max(1, microbatches)}
        shards, copies = self.legs() or (group, ())
        elements_into(seen, watch, shards, sizes, times=times, gathered=whole, these=bool(copies))
        if copies:
            mine = Traffic(ranks=len(copies), promised=promised)
            own = [max(1, size // len(shards)) for size in sizes]
            elements_into(mine, watch, copies, own, times=times, these=True)
            seen.reduced.update(mine.reduced)
            seen.faults += [f"between copies of shards: {fault}" for fault in mine.faults]
        return seen

    def legs(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """This rank's (ranks with the shards of one copy, ranks with the same shard) if shards are replicated; None otherwise."""
        return None

    def _size(self, name: str, parameter: Any) -> int:
        return int(parameter.numel())

    def audit_flags(self, promises: Promises) -> tuple[int, list[str]]:
        """FusedAdam's flags, and whether losses are scaled as promised."""
        looked, wrong = optimizer_faults(self, promises)
        promised, scale = promises.policy.loss_scale, self.loss_scale
        if promised is None and scale != 1.0:
            wrong.append(f"loss scale: promised none, found {scale:g}")
        if promised is not None and self.scaler is None:
            wrong.append("loss scale: promised one, found none (pass witness(scaler=...) if the loop has one)")
        return looked + 1, wrong

    # --- the update ----------------------------------------------------------------------------------------------------------------------
    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Hooks in after the last optimizer through torch's own hook, while gradients still exist; with several optimizers, each one's are sampled after its own step."""
        self._forget()

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._stepped.add(id(optimizer))
            if len(self.inner) > 1:
                self._sample(optimizer)
            if len(self._stepped) == len(self.inner):
                then(Update())
                self._forget()

        return together(*(inner.register_step_post_hook(stepped).remove for inner in self.inner))

    def _forget(self) -> None:
        self._stepped.clear()
        self._gradients_read.clear()

    def _sample(self, optimizer: Any) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.named_parameters():
            if id(parameter) in own and parameter.grad is not None and not parameter.grad.is_sparse:
                grad = local(parameter.grad).detach().reshape(-1)
                self._gradients_read[id(parameter)] = sample(grad, self._begin(name, parameter), int(parameter.numel()))

    def pending(self) -> Update | None:
        """Some of several optimizers stepped: a critic's, and not the delayed actor's."""
        return Update() if 0 < len(self._stepped) < len(self.inner) else None

    def on_step(self, begins: Callable[[], None]) -> Callable[[], None]:
        """Hooks in before the first optimizer through torch's own hook."""

        def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
            begins()

        return together(*(inner.register_step_pre_hook(steps).remove for inner in self.inner))


def _past_the_optimizer(parameter: Any) -> bool:
    return getattr(parameter, "main_grad", None) is not None and parameter.grad is None


def states(held: Held) -> Iterator[Live]:
    """The optimizer's states of one parameter."""
    for key, role in STATE_ROLES.items():
        tensor = held.state.get(key)
        if isinstance(tensor, torch.Tensor):
            # Transformer Engine's FP8 moments store codes, but the class reports FP32
            yield Live(role=role, parameter=held.name, tensor=getattr(tensor, "_data", tensor))


def copies_of(shards: Mapping[str, tuple[int, int]], read: Mapping[str, int] | None, *, copy: str = "") -> Copies:
    """Sizes of shards, and digests of what the forward pass read. shards: parameter -> (elements here, elements in all). copy: the words for a replica
    of the shards."""
    whole = {(name, 0, 0): read[name] for name in shards if name in read} if read is not None else {}
    return Copies(shards={f"{name}{copy}": sizes for name, sizes in shards.items()}, whole=whole)
