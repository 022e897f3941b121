"""One stage of a two-stage GPTModel: which quantization megatron-core hands to each linear, for policies with module rules.

Its one argument: how many chunks of the model each stage interleaves."""

from __future__ import annotations

import sys
from typing import Any

import mpbridge  # noqa: F401 first: a Transformer Engine without its CUDA parts would keep megatron-core from importing

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from mpbridge import MixedPrecisionConfig, plan, resolve
from mpbridge.backend.devices import device_layer
from mpbridge.backend.megatron.quant_recipe import chunk_layers, compile_rules
from mpbridge.backend.models.gpt import build_chunks
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.sync.apply import commit

LAYERS = 8
STAGES = 2
MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def check(policy: PrecisionPolicy, layer: int, name: str, found: Any) -> None:
    """found: what megatron-core handed to the linear `name` of the layer with that global number."""
    edge, wanted = layer in policy.bf16_layers(LAYERS), policy.at(name, layer, LAYERS)
    recipe = None if found is None else found.config["training_recipe"]
    if edge or wanted == policy.quant:
        assert recipe is None, (layer, name, recipe)  # the block decides
    elif wanted is None:
        assert recipe == {}, (layer, name, recipe)
    else:
        assert recipe == {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"}, (layer, name, recipe)


def main(chunks: int) -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, masked_softmax_fusion=False,
    )  # fmt: skip
    rules = {"mlp.linear_fc2": "bf16", "self_attention.*": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}
    edges = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    policy = resolve(MixedPrecisionConfig(bf16=True, fp8="hybrid", modules=rules, **edges))  # type: ignore[arg-type]
    commit(plan(policy, model=config), spell=compile_rules)
    # what Transformer Engine's linears have: megatron-core hands them their quantization
    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear.finish_init = lambda self, found: setattr(self, "found", found)
    models = build_chunks(config, {"vocab_size": 64, "max_sequence_length": 16}, policy, cuda=False)
    each, checked = LAYERS // STAGES // chunks, 0
    for number, model in enumerate(models):
        start = (number * STAGES + rank) * each
        assert chunk_layers(config, number if chunks > 1 else None) == tuple(range(start, start + each))
        modules = dict(model.module.named_modules())
        for layer in range(start, start + each):
            for name in MODULES:
                check(policy, layer, name, modules[f"decoder.layers.{layer - start}.{name}"].found)
                checked += 1
    print(f"stage {rank}: {checked} linears as the policy says", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with device_layer(False):
        main(int(sys.argv[1]))
    sys.exit(0)
