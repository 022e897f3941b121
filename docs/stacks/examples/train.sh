#!/bin/bash
DTYPE=${DTYPE:-fp8}
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --bf16
    --grad-reduce-in-bf16
    --use-distributed-optimizer
)
if [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=( --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather )
fi
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
