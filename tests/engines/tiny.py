"""Tiny runs: two layers of 64, learnable synthetic text, so that a test takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.checks.run import ModelShape, Parallel, RunFacts
from mpbridge.formats import DType
from mpbridge.precision.policy import LossScale, PrecisionPolicy

SEQ, VOCAB, HIDDEN = 32, 64, 64


def policy(kind: str = "bf16", **changes: Any) -> PrecisionPolicy:
    d = {"bf16": DType.BF16, "fp16": DType.FP16, "fp32": DType.FP32}[kind]
    facts: dict[str, Any] = {"compute": d, "params": d, "reduce": DType.FP32, "pipeline": d, "output": d}
    facts |= {"loss_scale": LossScale()} if kind == "fp16" else {}
    return PrecisionPolicy(**(facts | changes))


def run(
    kind: str = "bf16",
    *,
    world: int = 1,
    model: Any = (),
    optimizer: Any = (),
    ddp: Any = (),
    layers: int = 2,
    micro: int = 2,
    changes: Any = (),
    **parallel: Any,
) -> Any:
    p = policy(kind, **dict(changes))
    dtype = p.params.torch()
    m = dict(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        bf16=kind == "bf16",
        fp16=kind == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ) | dict(model)
    o = dict(
        lr=1e-3, bf16=kind == "bf16", fp16=kind == "fp16", params_dtype=dtype, clip_grad=1.0, weight_decay=0.01, initial_loss_scale=2.0**32
    ) | dict(optimizer)
    shape = ModelShape(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=4 * HIDDEN,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=VOCAB,
        seq_length=SEQ,
    )
    facts = RunFacts(shape=shape, parallel=Parallel(world_size=world, **parallel), micro_batch_size=micro, global_batch_size=8)
    inputs = {"model": m, "optimizer": o, "ddp": {"grad_reduce_in_fp32": True} | dict(ddp)}
    return SimpleNamespace(policy=p, plan=None, facts=facts, inputs=inputs, train={"seed": 1234}, emulate=False)


def batches(*, rank: int = 0, size: int = 1, micro: int = 2, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of counting sequences: `size` ranks together read what one reads."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, VOCAB, (micro * size, 1), generator=generator)
        text = ((start + torch.arange(SEQ + 1)) % VOCAB)[rank * micro : (rank + 1) * micro]
        positions = torch.arange(SEQ).expand(micro, SEQ)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": positions,
            "loss_mask": torch.ones(micro, SEQ),
        }
