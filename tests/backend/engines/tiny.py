"""Tiny runs: two layers of 64, learnable synthetic text, so that a test takes seconds."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.settings.container import ConfigContainer, Run

SEQ, VOCAB, HIDDEN = 32, 64, 64
RECIPES = {"fp32": "fp32", "bf16": "bf16_mixed", "fp16": "fp16_mixed"}

MODEL = {
    "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "add_bias_linear": False, "position_embedding_type": "rope", "share_embeddings_and_output_weights": True,
}  # fmt: skip


def run(
    kind: Any = "bf16",
    *,
    world: int = 1,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    parallel: Mapping[str, int] | None = None,
    **sections: Any,
) -> Run:
    """A resolved Run; kind: 'fp32', 'bf16', 'fp16' or anything that ConfigContainer takes as mixed_precision."""
    container = ConfigContainer(
        mixed_precision=RECIPES.get(kind, kind) if isinstance(kind, str) else kind,
        model=MODEL | dict(model or {}),
        optimizer={"lr": 1e-3, "clip_grad": 1.0, "weight_decay": 0.01} | dict(optimizer or {}),
        ddp=dict(ddp or {}),
        parallel=dict(parallel or {}),
        train={"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10},
        **sections,
    )
    return container.resolved(world_size=world)


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


def losses(engine: Any, steps: int, microbatches: int = 2) -> list[float]:
    text = batches()
    return [engine.train_step(text, microbatches=microbatches).loss for _ in range(steps)]


def watched(engine: Any, text: Iterator[Any], steps: int = 1, mode: Any = "stop") -> tuple[Any, list[Any]]:
    """(audit of the last step, results) of steps under a hook, made as the training loop makes them."""
    from mpbridge.observe.audit.hook import AuditHook

    hook, training, results = AuditHook(mode=mode), SimpleNamespace(engine=engine), []
    hook.built(training)
    hook.started(training)
    for _ in range(steps):
        hook.stepping(training)
        results.append(engine.train_step(text, microbatches=2))
        hook.stepped(training, results[-1])
    hook.closed()
    return hook.reports["live"], results
