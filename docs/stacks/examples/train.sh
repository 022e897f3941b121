#!/bin/bash
FP8="--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --bf16
    --grad-reduce-in-bf16
    --use-distributed-optimizer
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" $FP8
