"""One stage of a two-stage GPTModel: which quantization megatron-core hands to each linear, for policies with module rules."""

from __future__ import annotations

import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from mpbridge import MixedPrecisionConfig, plan, resolve
from mpbridge.devices import device_layer
from mpbridge.engines.quant_recipe import chunk_layers, compile_rules
from mpbridge.sync.apply import commit

LAYERS = 6
MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def main() -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )  # fmt: skip
    rules = {"mlp.linear_fc2": "bf16", "self_attention.*": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}
    author = MixedPrecisionConfig(bf16=True, fp8="hybrid", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1, modules=rules)
    policy = resolve(author)
    commit(plan(policy, model=config), spell=compile_rules)
    # what Transformer Engine's linears have: megatron-core hands them their quantization
    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear.finish_init = lambda self, found: setattr(self, "found", found)
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, pre_process=rank == 0, post_process=rank == 1
    )
    chunk = chunk_layers(config)
    assert chunk == ((0, 1, 2) if rank == 0 else (3, 4, 5)), chunk
    modules, checked = dict(model.named_modules()), 0
    for local, layer in enumerate(chunk):
        for name in MODULES:
            found = modules[f"decoder.layers.{local}.{name}"].found
            edge, wanted = layer in policy.bf16_layers(LAYERS), policy.at(name, layer, LAYERS)
            recipe = None if found is None else found.config["training_recipe"]
            if edge or wanted == policy.quant:
                assert recipe is None, (layer, name, recipe)  # the block decides
            elif wanted is None:
                assert recipe == {}, (layer, name, recipe)
            else:
                assert recipe == {"fp8_quantization_recipe": "blockwise", "fp8_format": "e4m3"}, (layer, name, recipe)
            checked += 1
    print(f"stage {rank}: {checked} linears as the policy says", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with device_layer(False):
        main()
    sys.exit(0)
