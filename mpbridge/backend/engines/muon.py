"""torch.optim.Muon on local shards: momentum where the weights are, and each matrix orthogonalized whole."""

from collections.abc import Mapping
from typing import Any

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.facts import ModelShape
from mpbridge.numerics.observation.tensors import local

_SCALES: Mapping[str, tuple[str, float]] = {"spectral": ("match_rms_adamw", 0.2), "shape_scaling": ("original", 1.0)}
"""muon_scale_mode -> torch's word for its dependence on the matrix's shape, and torch's factor in it: 0.2 sqrt(max(rows, columns)), sqrt(max(1, rows / columns))."""
_SAME = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


_Muon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)  # torch 2.6 to 2.8 have none


class ShardMuon(_Muon):  # type: ignore[misc]
    """Muon with torch's iteration and megatron-core's settings, whose parameters are this rank's rows of matrices.

    Each matrix's momentum is gathered, and every rank orthogonalizes it whole, so the update does not depend on the number of ranks. With muon_split_qkv
    queries, keys and values are matrices of their own. State of a parameter: 'momentum_buffer', of the shard's shape, in the gradient's dtype.
    Newton-Schulz runs in BF16 (torch 2.13 optim/_muon.py).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: Any,
        shape: ModelShape,
        whole: Mapping[str, Any],
        shards: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """whole: the DTensors of all matrices by name, in the same order on every rank. shards: this rank's rows, for those that have some."""
        if _Muon is torch.optim.Optimizer:
            raise Refused(
                f"optimizer=muon on shards needs torch.optim.Muon (torch 2.9), found torch {torch.__version__}: install a newer torch"
            )
        scale, own = _SCALES[config.muon_scale_mode]
        nesterov = getattr(config, "muon_nesterov", None)  # its name since 0.18
        how = {"momentum": config.muon_momentum, "ns_steps": config.muon_num_ns_steps, "adjust_lr_fn": scale}
        how["nesterov"] = config.muon_use_nesterov if nesterov is None else nesterov
        super().__init__(groups, lr=config.lr, weight_decay=config.weight_decay, **how)
        self.whole, self.shards, self.factor = whole, shards, config.muon_extra_scale_factor / own
        self.split = split_of(config, shape)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix with a gradient; a collective over the ranks that share the matrices."""
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        for name, matrix in self.whole.items():
            if matrix.grad is None:
                continue
            shard = self.shards.get(name)
            part = torch.zeros_like(local(matrix)) if shard is None else self.direction(shard, group_of[id(shard)])
            direction = placed_as(matrix, part).full_tensor()
            if shard is not None:
                group = group_of[id(shard)]
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(part_of(matrix, self._moved(name, direction, group)))

    def direction(self, shard: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """What is orthogonalized, on this rank: the momentum after this gradient, looked ahead under Nesterov."""
        assert shard.grad is not None
        state = self.state[shard]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(shard.grad)
        kept: torch.Tensor = state["momentum_buffer"].lerp_(shard.grad, 1 - group["momentum"])
        return shard.grad.lerp(kept, group["momentum"]) if group["nesterov"] else kept

    def _moved(self, name: str, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The change of the whole matrix: torch's own update of zeros by that direction, without momentum."""
        found = []
        for one in parts_of(name, direction, self.split):
            zeros = torch.nn.Parameter(torch.zeros_like(one))
            zeros.grad = one
            same = {option: group[option] for option in _SAME} | {"lr": group["lr"] * self.factor}
            update: Any = torch.optim.Muon([zeros], weight_decay=0.0, momentum=0.0, nesterov=False, **same)
            update.step()
            found.append(zeros.detach())
        if len(found) == 1:
            return found[0]
        assert self.split is not None
        rows = [one.view(-1, size, one.shape[1]) for one, size in zip(found, self.split, strict=True)]
        return torch.cat(rows, dim=1).view_as(direction)


def split_of(config: Any, shape: ModelShape) -> tuple[int, int, int] | None:
    """Rows of a query group's queries, key and value, which muon_split_qkv makes matrices of their own; None: all are one matrix."""
    heads, width = shape.num_attention_heads // shape.num_query_groups, shape.kv_channels
    return (heads * width, width, width) if config.muon_split_qkv else None


def parts_of(name: str, matrix: torch.Tensor, split: tuple[int, int, int] | None) -> list[torch.Tensor]:
    """The matrices that are orthogonalized for a parameter: itself, or its queries, keys and values, as copies. split: from `split_of`."""
    if split is None or not name.endswith("linear_qkv.weight"):
        return [matrix]
    rows = torch.split(matrix.view(-1, sum(split), matrix.shape[1]), list(split), dim=1)
    return [one.reshape(-1, matrix.shape[1]) for one in rows]


def placed_as(matrix: Any, part: torch.Tensor) -> Any:
    """A DTensor with this rank's part, laid out as `matrix`."""
    from torch.distributed.tensor import DTensor

    where = {"shape": matrix.shape, "stride": matrix.stride(), "run_check": False}
    return DTensor.from_local(part.contiguous(), matrix.device_mesh, matrix.placements, **where)


def part_of(matrix: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part, laid out as that of `matrix`, of a tensor that every rank has whole."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = matrix.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(everywhere.redistribute(mesh, matrix.placements))  # type: ignore[no-any-return]
