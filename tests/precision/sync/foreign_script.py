"""Somebody else's training script: its own configs, model, optimizer and loop. Ours are `plan`, `apply` and `wrap` (and a CPU in place of CUDA)."""

from __future__ import annotations

import sys
from typing import Any

import mpbridge  # first: a Transformer Engine without its CUDA parts would keep megatron-core from importing

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mpbridge.backend.devices import device_layer

STEPS = 40


def configs() -> tuple[Any, Any, Any]:
    model = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        moe_router_dtype=None,
    )  # fmt: skip
    # what an FP32 author has: under dynamic loss scaling this check would end the run at the first overflow
    return model, OptimizerConfig(lr=1e-2), DistributedDataParallelConfig(check_for_nan_in_grad=True)


def main(recipe: str, by_hand: bool) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config, optimizer_config, ddp_config = configs()

    policy = mpbridge.resolve(mpbridge.get_mixed_precision_config(recipe))
    made = mpbridge.plan(policy, model=config, optimizer=optimizer_config, ddp=ddp_config)
    mpbridge.apply(made)

    model: Any = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=32
    )
    if by_hand:
        model = Float16Module(config, model) if config.bf16 or config.fp16 else model
        model = DistributedDataParallel(config, ddp_config, model)
        optimizer = get_megatron_optimizer(optimizer_config, [model])
        config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    else:
        model, optimizer = mpbridge.wrap(model, made, optimizer_config)
    tokens = torch.arange(4 * 33).view(4, 33) % 64
    mask, positions = torch.triu(torch.ones(1, 1, 32, 32), 1).bool(), torch.arange(32).expand(4, 32)

    def forward(_: Any, chunk: Any) -> Any:
        losses = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return losses, lambda out: (out.float().mean(), {"loss": out.float().mean().detach().clone()})

    seen, skipped = [], 0
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        out = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([]), model=[model], num_microbatches=1, seq_length=32, micro_batch_size=4, forward_only=False
        )  # fmt: skip
        applied, _, _ = optimizer.step()
        skipped += not applied
        seen.append(out[0]["loss"].item())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    print(repr(seen))
    print(f"{dtype} {seen[0]:.3f} {seen[-1]:.3f} {skipped}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with device_layer(False):
        main(sys.argv[1], by_hand="--by-hand" in sys.argv)
