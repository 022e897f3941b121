"""A GPTModel as the FSDP engines need it: every parameter as megatron-core drew it, no Float16Module around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.precision.policy import PrecisionPolicy


def plain_model(config: Any, arguments: Mapping[str, Any], policy: PrecisionPolicy, *, cuda: bool, backend: Any = None) -> Any:
    """The whole model of one pipeline stage. Float16Module would round FP32 storage to BF16 on its way in, and who casts here is the sharding wrapper."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mpbridge.engines.local_spec import CpuSpecProvider
    from mpbridge.engines.model import _logits_in, block_spec, transformer_engine_spec

    spec = (
        transformer_engine_spec(config, chunk=None)
        if backend is None and cuda
        else block_spec(config, (backend or CpuSpecProvider)(config), chunk=None)
    )
    model = GPTModel(config=config, transformer_layer_spec=spec, pre_process=True, post_process=True, **arguments)
    if policy.logits is not None:
        _logits_in(model.output_layer, policy.logits.torch())
    return model
