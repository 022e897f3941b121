"""torchao's FP8 inside megatron-core's parallel linears: their local matrix product is torchao's, native on a GPU, emulated by torchao itself elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from mpbridge.backend.megatron.emulated_linears import _Emulated, places
from mpbridge.backend.megatron.inside_model import LocalMatmul
from mpbridge.common.errors import Refused
from mpbridge.common.shipped import install
from mpbridge.numerics.linear import Pausable
from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant
from mpbridge.precision.wording import rule_words


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoPlug:
    """The GEMM configuration of one linear."""

    gemms: Gemms
    config: Any
    """torchao's Float8LinearConfig."""
    owner: TorchaoLinears
    quant: Quant
    """The rule of all three GEMMs."""

    @property
    def emulated(self) -> bool:
        """Whether torchao emulates the GEMMs."""
        return bool(self.config.emulate)

    @property
    def fprop(self) -> TorchaoPlug:
        """What has the rule of that GEMM."""
        return self

    dgrad = wgrad = fprop


class _Float8(_Emulated):
    """Mixin for megatron-core's parallel linears, which keep their weights, communication and checkpoints."""

    plug: Any = None

    @property
    def quant(self) -> Quant | None:
        """The rule of the GEMMs; None: high precision."""
        return None if self.plug is None else self.plug.quant

    def product(
        self, plain: LocalMatmul, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """torchao's product, or megatron-core's own if the rule is high precision."""
        if self.plug is None or self.plug.owner.is_paused:
            return plain(input, weight, *args, **kwargs)
        bias = kwargs.get("bias")
        result = multiply(self.plug.config, input, weight)
        return result if bias is None else result + bias.to(result.dtype)


class Float8ColumnParallelLinear(_Float8, ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's ColumnParallelLinear with torchao's product."""


class Float8RowParallelLinear(_Float8, RowParallelLinear):  # type: ignore[misc]
    """megatron-core's RowParallelLinear with torchao's product."""


def multiply(config: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T with forward and backward GEMMs in float8 according to a Float8LinearConfig; x: [..., in], weight: [out, in]."""
    # an expert without tokens: torchao's own layer raises an IndexError if the dimension to scale along is empty
    if not x.numel():
        return torch.nn.functional.linear(x, weight.to(x.dtype))
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    each = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    made = (ScaledMMConfig(config.emulate, one.use_fast_accum, False, config.pad_inner_dim) for one in each)
    result: torch.Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), LinearMMConfig(*made), config)
    return result


def config_of(quant: Quant, *, emulate: bool) -> Any:
    """torchao's Float8LinearConfig for a rule. Raises Refused if torchao is missing."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise Refused(f"{quant.row.words} needs torchao ({error}): {install('torchao')}") from None
    return replace(Float8LinearConfig.from_recipe_name(quant.row.recipe_class()), emulate=emulate)


class TorchaoLinears(Pausable):
    """The counterpart of `mpbridge.numerics.Emulation` for torchao: assigns rules to the linears of a built model. It has no state."""

    parallel_linears = Float8ColumnParallelLinear, Float8RowParallelLinear

    def __init__(self, policy: PrecisionPolicy, *, emulate: bool) -> None:
        self.policy, self.emulate = policy, emulate
        self.plugs: dict[str, TorchaoPlug] = {}
        """Global name of a linear -> its rule."""
        self.high: list[str] = []
        self._linears: list[Any] = []
        self._configs = {quant: config_of(quant, emulate=emulate) for quant in policy.quants if quant.row.core is None}

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Assigns the linears their rules. Raises Refused for a rule that torchao supports only in part."""
        for chunk in chunks:
            for linear, name, below, layer, layers in places(chunk):
                gemms = self.policy.gemms_at(below, layer, layers, name)
                if not gemms.distinct:
                    self.high.append(name)
                    continue
                if len({gemms.fprop, gemms.dgrad, gemms.wgrad}) > 1:
                    raise Refused(
                        f"{name}: {rule_words(gemms)}; torchao supports one rule for all three GEMMs of a linear"
                    )
                quant = gemms.distinct[0]
                rule = TorchaoPlug(gemms=gemms, config=self._configs[quant], owner=self, quant=quant)
                self.plugs[name] = linear.plug = rule  # type: ignore[assignment]
                self._linears.append(linear)

    def step_begin(self) -> None:
        """Does nothing: weights are cast in every forward pass."""

    def step_at(self, step: int) -> None:
        """Does nothing: nothing is rounded at random."""

    evaluating = nullcontext

    def sharded_state(self, prefix: str = "") -> dict[str, Any]:
        """Empty: scales come from the tensors themselves."""
        return {}

    def load_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Nothing."""

    def detach(self) -> None:
        """Removes the rules."""
        for linear in self._linears:
            del linear.plug
        self._linears, self.plugs = [], {}

    def notes(self) -> tuple[str, ...]:
        """What computes the GEMMs, and how the result differs from a GPU's."""
        import torchao

        count = f"{len(self.plugs)} linears quantized, {len(self.high)} kept in high precision"
        if not self.emulate:
            return (f"float8 by torchao {torchao.__version__}: {count}",)
        return (
            f"emulated by torchao {torchao.__version__}'s own float8 emulation: {count}",
            "GEMMs run in FP32 on dequantized operands: tensor cores sum in their own order",
        )
