"""Any torch optimizer on the local shards of DTensor parameters, with the global norm, clipping, loss scaling and megatron-core's parameter groups."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.backend.engines.muon import ShardMuon
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.megatron.inside_optimizer import parameter_groups
from mpbridge.common.errors import Refused
from mpbridge.common.facts import MUONS, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.shipped import install
from mpbridge.planning.memory.keeps import Holding, fused, keeps_of, trained_by
from mpbridge.precision.policy import PrecisionPolicy

log = logging.getLogger("mpbridge")
_warned: set[str] = set()


def fused_adam(cuda: bool) -> Any:
    """Transformer Engine's FusedAdam on CUDA, ours on a CPU. Raises Refused if Transformer Engine is missing."""
    if not cuda:
        return CpuFusedAdam
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError as error:
        raise Refused(
            f"this recipe keeps optimizer states in other dtypes than the parameters', which needs Transformer Engine's FusedAdam ({error}): "
            f"{install('te')}, or use fp32_params_bf16_compute with torch's AdamW"
        ) from None
    return FusedAdam


def fused_arguments(kept: Mapping[str, Holding]) -> dict[str, Any]:
    """FusedAdam's arguments for state dtypes, given `kept`: what is kept for the parameters (main weights, remainders, FP32 moments)."""
    main = kept.get("main_params")
    kept_by_it = None if main is None or main.owner != "optimizer" else main.dtype
    remainders = kept_by_it is DType.INT16
    return {
        "master_weights": kept_by_it is not None,
        "master_weight_dtype": torch.float32 if kept_by_it is None or remainders else kept_by_it.torch(),
        "store_param_remainders": remainders,
        "exp_avg_dtype": kept["exp_avg"].dtype.torch(),
        "exp_avg_sq_dtype": kept["exp_avg_sq"].dtype.torch(),
    }


def _inner(
    groups: list[dict[str, Any]], policy: PrecisionPolicy, facts: RunFacts, config: Any, *, cuda: bool
) -> torch.optim.Optimizer:
    """The optimizer for parameter groups that share a dtype."""
    if config.optimizer in OWN:
        return OWN[config.optimizer](groups, config)
    if facts.optimizer.name in MUONS or not fused(policy, facts.traits):
        return torchs_adam(groups, config)
    own = [p for group in groups for p in group["params"]]
    arguments = without_duplicate(own, fused_arguments(keeps_of(policy, facts))) | _adam(config)
    optimizer: torch.optim.Optimizer = fused_adam(cuda)(groups, adam_w_mode=config.decoupled_weight_decay, **arguments)
    return optimizer


OWN: Mapping[str, Callable[[list[dict[str, Any]], Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups, config: torch.optim.SGD(
        groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum
    ),
}
"""Value of optimizer.optimizer -> from parameter groups and the optimizer's config, one that updates the parameters themselves, with states of their dtype."""


def _adam(config: Any) -> dict[str, Any]:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.lr, "weight_decay": config.weight_decay, "betas": betas, "eps": config.adam_eps}


def torchs_adam(groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer:
    """torch's AdamW, or Adam without decoupled weight decay."""
    torchs: Any = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    plain: torch.optim.Optimizer = torchs(groups, **_adam(config))
    return plain


def scaler(config: Any) -> Any:
    """megatron-core's loss scaler for an optimizer config; None if the loss is not scaled."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


Offset = Callable[[str, Any], tuple[int, ...]]
"""(name, DTensor) -> first index of this rank's part along each dimension."""


def placed(name: str, parameter: Any) -> tuple[int, ...]:
    """Where the local shard of a DTensor with regular placements begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1])


class ShardOptimizer:
    """Optimizers over views of local shards: no DTensor dispatch, no empty shards, plain tensors as states.

    An elementwise optimizer treats every element alike, whichever rank has it, so the result equals that on the whole parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        policy: PrecisionPolicy,
        facts: RunFacts,
        config: Any,
        group: dist.ProcessGroup,
        *,
        cuda: bool,
        offset: Offset | None = None,
    ) -> None:
        """parameters: DTensors by global name, those to update. policy: resolved. group: the ranks that share the shards.

        offset: where a local shard begins in its parameter; None: according to DTensor's placements.
        """
        self.config, self.shape = config, facts.shape
        self.group = group
        self.grad_scaler = scaler(config)
        self.names: dict[str, Any] = dict(parameters)
        """Name -> sharded parameter (a DTensor)."""
        self.offset: Offset = offset or placed
        self.shards: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(p._local_tensor, requires_grad=False)
            for name, p in self.names.items()
            if p.requires_grad and p._local_tensor.numel()
        }
        """Name -> view of this rank's part, for parameters that have one."""
        mine = {id(self.names[name]): shard for name, shard in self.shards.items()}
        # megatron-core's rules: no weight decay for biases and norms, multipliers, minimum rates
        groups = parameter_groups(self.names, config)
        local = [{**group, "params": [mine[id(p)] for p in group["params"] if id(p) in mine]} for group in groups]
        # from the whole model, so that ranks without a shard of some dtype have the same optimizers
        dtypes = list(dict.fromkeys(p.dtype for p in self.names.values() if p.requires_grad))
        self.parts = [_inner(_of_dtype(local, kind), policy, facts, config, cuda=cuda) for kind in dtypes]
        if facts.optimizer.name in MUONS:
            self.parts = [part for kind in dtypes for part in self._with_muon(_of_dtype(local, kind), config)]

    def _with_muon(self, groups: list[dict[str, Any]], config: Any) -> Iterator[torch.optim.Optimizer]:
        """Muon for the matrices of these groups, and torch's Adam for the rest."""
        whole = {name: p for name, p in self.names.items() if trained_by("muon", name, p.dim()) == "muon"}
        mine = {id(self.shards[name]) for name in whole if name in self.shards}
        for muon in (True, False):
            some = [{**group, "params": [p for p in group["params"] if (id(p) in mine) is muon]} for group in groups]
            yield ShardMuon(some, config, self.shape, whole, self.shards) if muon else torchs_adam(some, config)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts: megatron-core's OptimizerParamScheduler reads and sets them."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def chained_optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside."""
        return self.parts

    def state_of(self, name: str) -> Mapping[str, Any]:
        """Optimizer state of a parameter's local shard; empty before its first update."""
        shard = self.shards.get(name)
        for part in self.parts:
            if shard is not None and shard in part.state:
                found: Mapping[str, Any] = part.state[shard]
                return found
        return {}

    def part_of(self, name: str) -> Any:
        """The torch optimizer that updates a parameter's local shard."""
        shard = self.shards[name]
        return next(part for part in self.parts for group in part.param_groups for p in group["params"] if p is shard)

    def kind(self, part: Any) -> str:
        """Row of OPTIMIZERS of one of `parts`."""
        if self.config.optimizer in MUONS:
            return "muon" if isinstance(part, ShardMuon) else "adam"
        return str(self.config.optimizer)

    def get_loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return 1.0 if self.grad_scaler is None else float(self.grad_scaler.scale)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        return loss if self.grad_scaler is None else loss * self.get_loss_scale()

    def zero_grad(self) -> None:
        """Drops gradients of shards and parameters."""
        for name, parameter in self.names.items():
            parameter.grad = None
            if name in self.shards:
                self.shards[name].grad = None

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter, its shard's gradient), set on the shard itself; checks storage first, because FSDP2 may move a parameter when states are loaded."""
        for name, shard in self.shards.items():
            parameter = self.names[name]
            if shard.data_ptr() != parameter._local_tensor.data_ptr():
                shard.data = parameter._local_tensor
            shard.grad = None if parameter.grad is None else parameter.grad._local_tensor
            if shard.grad is not None:
                yield name, shard.grad

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None]:
        """(applied, global gradient norm before clipping, unscaled; None when the step was skipped). Weights are never updated with non-finite gradients."""
        grads = [gradient for _, gradient in self.gradients()]
        inverse = 1.0 / self.get_loss_scale()
        if inverse != 1.0:
            for grad in grads:
                grad.mul_(inverse)
        norm = self._norm(grads)
        finite = math.isfinite(norm)
        if self.grad_scaler is not None:
            self.grad_scaler.update(not finite)
        if not finite:
            return False, None
        limit = float(self.config.clip_grad)
        if limit > 0.0 and norm > limit:
            factor = limit / (norm + 1.0e-6)  # as megatron-core's clip_grad_by_total_norm_fp32
            for grad in grads:
                grad.mul_(factor)
        for part in self.parts:
            part.step()
        return True, norm

    def _norm(self, grads: list[torch.Tensor]) -> float:
        """L2 norm over all shards, accumulated in FP32 regardless of the gradients' dtype."""
        device = grads[0].device if grads else next(iter(self.names.values())).device
        total = torch.zeros((), dtype=torch.float32, device=device)
        for grad in grads:
            total += torch.linalg.vector_norm(grad, dtype=torch.float32) ** 2
        if self.group.size() > 1:
            dist.all_reduce(total, group=self.group)
        return float(total.sqrt())


def _of_dtype(groups: list[dict[str, Any]], kind: torch.dtype) -> list[dict[str, Any]]:
    """The groups with the parameters of one dtype only: FusedAdam has one switch for the main weights of all its parameters."""
    return [{**group, "params": [p for p in group["params"] if p.dtype is kind]} for group in groups]


def _first_time(what: str) -> bool:
    """Whether to warn of it: once per process, and on rank 0 only."""
    if what in _warned or (dist.is_initialized() and dist.get_rank() != 0):
        return False
    _warned.add(what)
    return True


def without_duplicate(parameters: Iterable[torch.Tensor], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """FusedAdam's arguments for parameters of one dtype, without main weights if they would be an unused copy.

    For FP32 parameters FusedAdam updates the parameter and never reads its main weights (fused_adam.py, the FP32 branch of step): 4 bytes per
    parameter wasted.
    """
    if arguments.get("master_weights") and all(p.dtype is torch.float32 for p in parameters):
        if _first_time("duplicate"):
            log.warning(
                "FusedAdam's main weights are off for FP32 parameters: they are their own main copy (saves 4 bytes per parameter)"
            )
        return dict(arguments) | {"master_weights": False, "store_param_remainders": False}
    return dict(arguments)
