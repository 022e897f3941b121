"""CpuFusedAdam: Adam in plain torch with the interface and the state layout of Transformer Engine's FusedAdam, which megatron-core expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.numerics.optimizers import BLOCK, Scalars, join, split, update

LARGEST: Mapping[torch.dtype, float] = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}
"""What a scaled state's absolute maximum is mapped to: half of FP16's largest value, the largest value of E4M3 (fused_adam.py, dtype_to_range_map)."""


def _update_plain(rows: list[tuple[torch.Tensor, ...]], s: Scalars) -> None:
    """Updates parameters whose weights and states are stored in FP32, of which a row has (parameter, weights, gradient, moments), by one call of torch's
    fused kernel, five times faster than `update`.

    The kernel folds bias corrections and weight decay into other operations than adam.cu: equal up to rounding, 2**-22 of a weight's or an update's size.
    """
    if not rows:
        return
    params, *lists = (list(column) for column in zip(*rows, strict=True))
    kernel: Any = torch._fused_adamw_ if s.decoupled else torch._fused_adam_
    steps = [torch.tensor(float(s.step or 0))] * len(rows)
    options = {"lr": s.lr, "beta1": s.beta1, "beta2": s.beta2, "weight_decay": s.weight_decay, "eps": s.eps}
    kernel(*lists, [], steps, **options, amsgrad=False, maximize=False)
    for param, weights in zip(params, lists[0], strict=True):
        if param.dtype is not torch.float32:
            param.copy_(weights)


def follow(optimizer: Any, param: torch.Tensor, main: torch.Tensor | None) -> None:
    """Sets the main weights of a FusedAdam, if it has some, equal to a parameter that was just loaded: a remainder is then zero."""
    if main is not None and main.dtype is torch.int16:
        main.zero_()
    elif main is not None:
        optimizer.set_scaled_state(param, "master_param", param.detach().float())


class CpuFusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with optional low-precision moments, main weights kept by the optimizer, and gradients in `decoupled_grad`.

    State of a parameter: 'exp_avg', 'exp_avg_sq' and, with master_weights, 'master_param'. FP32 and BF16 are stored as they are; FP16 and uint8 (the bit patterns
    of E4M3) with one FP32 scale per tensor; with store_param_remainders the main weights of BF16 parameters are the int16 lower halves of their bits.
    The step count is the group's 'step'. Updates are computed in FP32. Raises BadValue for a dtype that FusedAdam has no state for.
    Source of interface and arithmetic: Transformer Engine 2.11, pytorch/optimizers/fused_adam.py and common/multi_tensor/adam.cu.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        main = master_weight_dtype if master_weights else torch.float32
        _check(amsgrad, capturable, main, exp_avg_dtype, exp_avg_sq_dtype)
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        dtypes = (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)
        self.name_to_dtype_map = dict(zip(("exp_avg", "exp_avg_sq", "master_param"), dtypes, strict=True))
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._scratch: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def _is_remainder(self, param: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype is torch.bfloat16

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Zero moments and, with master_weights, main weights equal to `param`.

        store_param_remainders is accepted because Transformer Engine's callers pass it (megatron-core 0.16.1 does not); the constructor's value is used.
        """
        for name in ("exp_avg", "exp_avg_sq"):
            self._allocate(param, name).zero_()
        if self.master_weights:
            follow(self, param, self._allocate(param, "master_param"))

    def _allocate(self, param: torch.Tensor, name: str) -> torch.Tensor:
        dtype = torch.int16 if self._is_remainder(param, name) else self.name_to_dtype_map[name]
        stored = torch.empty_like(param, dtype=dtype, requires_grad=False)
        if dtype in LARGEST:
            self._scales.setdefault(param, {})[name] = torch.ones(1, dtype=torch.float32, device=param.device)
        self.state[param][name] = stored
        return stored

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """The state in FP32; the stored tensor itself if it is FP32.

        Remainders are returned joined with their parameter, as full main weights. Transformer Engine returns the int16 halves, which megatron-core's
        fully reshardable checkpoints then store as if they were weights, and cannot load (from reading fused_adam.py 2.11 and distrib_optimizer.py 0.16.1).
        """
        stored: torch.Tensor = self.state[param][state_name]
        if stored.dtype is torch.int16:
            return join(param.detach(), stored)
        if stored.dtype not in LARGEST:
            return stored.float()  # itself, if it is FP32
        values = stored.view(torch.float8_e4m3fn) if stored.dtype is torch.uint8 else stored
        return values.float().mul_(self._scales[param][state_name])

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Stores an FP32 state in its own dtype, with a new scale if it has one.

        FP32 main weights of a BF16 parameter with remainders set the parameter too; an int16 tensor is the remainder itself. Raises BadValue for any other dtype.
        """
        remainder = self._is_remainder(param, state_name)
        if unscaled_state.dtype is not torch.float32 and not (remainder and unscaled_state.dtype is torch.int16):
            raise BadValue(
                f"{state_name} is {unscaled_state.dtype}, expected torch.float32{' or torch.int16' if remainder else ''}"
            )
        stored = self.state[param].get(state_name)
        if stored is None:
            stored = self._allocate(param, state_name)
        if remainder and unscaled_state.dtype is torch.float32:
            split(unscaled_state, param.detach(), stored)
            return
        if stored.dtype not in LARGEST:
            stored.copy_(unscaled_state)
            return
        scale = self._scales[param][state_name]
        # (a shard can be empty, and amax of an empty tensor raises)
        largest = unscaled_state.abs().amax() if unscaled_state.numel() else 0.0
        scale.fill_(largest / LARGEST[stored.dtype])
        scaled = unscaled_state.to(stored.device) * torch.where(scale > 0, scale.reciprocal(), 0.0)
        (stored.view(torch.float8_e4m3fn) if stored.dtype is torch.uint8 else stored).copy_(scaled)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes gradients where this optimizer reads them: `decoupled_grad` or `grad`."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                if set_to_none or grad is None:
                    param.decoupled_grad = None
                else:
                    grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            # one count per group, and none for an empty group, as in FusedAdam
            group["step"] = group.get("step", 0) + 1
            named = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            step = group["step"] if group["bias_correction"] else None
            scalars = Scalars(**named, step=step, decoupled=bool(self.adam_w_mode))
            plain: list[tuple[torch.Tensor, ...]] = []
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is None:
                    continue
                weights = self._weights(param)
                m, v = (self.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq"))
                stored = all(self.state[param][n].dtype is torch.float32 for n in ("exp_avg", "exp_avg_sq"))
                if stored and weights is not None and step is not None:
                    plain.append((param, weights, grad.float(), m, v))
                else:
                    self._convert_and_update(param, grad, m, v, scalars)
            _update_plain(plain, scalars)
        return loss

    def _weights(self, param: torch.Tensor) -> torch.Tensor | None:
        """The tensor to update if it is stored in FP32; None if it must be converted first."""
        if param.dtype is torch.float32:
            # their master_param, if any, is not used, as in Transformer Engine
            return param.detach()
        stored = self.state[param].get("master_param")
        return stored if stored is not None and stored.dtype is torch.float32 else None

    def _convert_and_update(
        self, param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, scalars: Scalars
    ) -> None:
        remainder = self._is_remainder(param, "master_param")
        if remainder:
            weights = join(param.detach(), self.state[param]["master_param"])
        elif self.master_weights and param.dtype is not torch.float32:
            weights = self.get_unscaled_state(param, "master_param")
        else:
            weights = param.detach().float()
        update(weights.view(-1), grad.float().reshape(-1), m.view(-1), v.view(-1), scalars, self._buffers(param.device))
        for name, state in (("exp_avg", m), ("exp_avg_sq", v)):
            if state is not self.state[param][name]:
                self.set_scaled_state(param, name, state)
        if remainder:
            split(weights, param.detach(), self.state[param]["master_param"])
        elif param.dtype is not torch.float32:
            param.copy_(weights)
            if self.master_weights and weights is not self.state[param]["master_param"]:
                self.set_scaled_state(param, "master_param", weights)

    def _buffers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._scratch:
            self._scratch[device] = (torch.empty(BLOCK, device=device), torch.empty(BLOCK, device=device))
        return self._scratch[device]

    def state_dict(self) -> dict[str, Any]:
        """torch's layout with every state in FP32: checkpoints do not depend on the dtypes of stored states."""
        saved = super().state_dict()
        params = self._by_index(saved)
        for index, state in saved["state"].items():
            saved["state"][index] = {name: self.get_unscaled_state(params[index], name) for name in state}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads `state_dict`; states of any float dtype are accepted and stored in this optimizer's own."""
        # torch's own loading would cast states to the parameter's dtype first, so it is given the groups only
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        self._scales.clear()
        params = self._by_index(state_dict)
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                if value is not None:
                    param = params[index]
                    self.set_scaled_state(param, name, value if value.dtype is torch.int16 else value.float())

    def _by_index(self, state_dict: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        indices = (index for group in state_dict["param_groups"] for index in group["params"])
        return dict(zip(indices, (param for group in self.param_groups for param in group["params"]), strict=True))


def _check(amsgrad: bool, capturable: bool, master: torch.dtype, exp_avg: torch.dtype, exp_avg_sq: torch.dtype) -> None:
    moments = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    found = [f"{option}=True" for option, value in (("amsgrad", amsgrad), ("capturable", capturable)) if value]
    for name, dtype, known in (
        ("exp_avg_dtype", exp_avg, moments),
        ("exp_avg_sq_dtype", exp_avg_sq, moments),
        ("master_weight_dtype", master, (torch.float32, torch.float16)),
    ):
        found += [f"{name}={dtype}"] if dtype not in known else []
    if found:
        raise BadValue(
            f"FusedAdam has no {', '.join(found)} on a CPU (expected moments in fp32, bf16, fp16 or uint8, main weights in fp32 or fp16, amsgrad and capturable off)"
        )
