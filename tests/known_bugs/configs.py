"""Configurations that other stacks accepted in silence: megatron-core's own classes take each; `mpbridge check` and `plan` say what it does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mpbridge.cli.main import main
from mpbridge.planning.rules.table import broken
from tests.planning.rules.test_rules import TABLE, case

MX = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "mxfp8-with-e5m2-gradients": {"model": {"fp8": "hybrid", "fp8_recipe": "mxfp8"}},
    "mxfp8-gather-without-reused-buffer": {"model": MX, "ddp": {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": False}},
    "mxfp8-gather-without-overlap-gives-nan": {
        "model": MX, "ddp": {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": False},
    },
    "gather-misplaces-what-follows-odd-sizes": {
        "model": MX, "ddp": {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": True},
    },
    "muon-under-mxfp8": {"model": MX, "optimizer": {"optimizer": "muon"}},
    "module-rule-matches-nothing": {"model": {}},
    "module-rule-in-stored-layer": {"model": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}},
    "full-16-bit-with-distributed-optimizer": {"optimizer": {"bf16": False, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}},
    "moments-follow-16-bit-parameters": {"optimizer": {"bf16": True}},
}  # fmt: skip
"""Rule -> what megatron-core's classes are given of the configuration that breaks it; the configuration itself stands in the rules' own tests."""


def checked(rule: str) -> str:
    """megatron-core's own config classes raise nothing; what `mpbridge check` says of the same run."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    sections = RULES[rule]
    TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, bf16=True, **sections.get("model", {}))
    OptimizerConfig(**sections.get("optimizer", {}))
    DistributedDataParallelConfig(**sections.get("ddp", {}))
    return "\n".join(f"{one.severity} {one.rule}: {one.found}" for one in broken(*case(**TABLE[rule][0])))


def planned(*arguments: str) -> str:
    """What `mpbridge plan` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["plan", *arguments])
    return " ".join(out.getvalue().split())


PLAYS: dict[str, Callable[[], str]] = {rule: partial(checked, rule) for rule in RULES} | {
    "override": partial(planned, "--recipe", "bf16_mixed", "ddp.grad_reduce_in_fp32=false")
}
