"""Tiny runs that are saved, broken off and resumed: two layers of 64 on text that can be learnt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.training.base import Hook

SEQ, VOCAB = 32, 64
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "add_bias_linear": False, "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": True,
}  # fmt: skip


LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "ffn_hidden_size": 128}
"""Added to it, a model that has a layout of Hugging Face's."""


class Text:
    """Counting sequences, endless and the same every time."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            start = torch.randint(0, VOCAB, (1,), generator=generator)
            yield {"tokens": (start + torch.arange(SEQ + 1)) % VOCAB}


def run(recipe: Any = "bf16_mixed", *, world: int = 1, iters: int = 6, **sections: Mapping[str, Any]) -> Run:
    """A resolved Run; a section's settings are added to the tiny ones."""
    container = ConfigContainer(
        mixed_precision=recipe,
        engine=sections.pop("engine", None),
        emulate=bool(sections.pop("emulate", False)),
        model=MODEL | dict(sections.pop("model", {})),
        optimizer={"lr": 1e-3, "clip_grad": 1.0, "weight_decay": 0.01} | dict(sections.pop("optimizer", {})),
        train={"micro_batch_size": 2, "global_batch_size": 4, "train_iters": iters, "eval_interval": None, "threads": 1}
        | dict(sections.pop("train", {})),
        scheduler={"lr_decay_style": "cosine", "lr_decay_iters": 100, "lr_warmup_iters": 2}
        | dict(sections.pop("scheduler", {})),
        **sections,
    )
    return container.resolved(world_size=world)


def digest(training: Any) -> str:
    """sha256 over every parameter, main weight and moment of this rank, by name."""
    found = hashlib.sha256()
    keep = ("params", "main_params", "exp_avg", "exp_avg_sq")
    tensors = [live for live in training.engine.tensors() if live.role in keep]
    # moments that were never updated are zeros, or not there yet: the same thing
    tensors = [live for live in tensors if live.tensor.any() or not live.role.startswith("exp")]
    for live in sorted(tensors, key=lambda one: (one.role, one.parameter)):
        found.update(f"{live.role} {live.parameter} {live.tensor.dtype}".encode())
        found.update(live.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Watch(Hook):
    """Keeps each step's loss and, at the end, the digest of the state."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.scales: dict[int, float] = {}
        self.digest = ""
        self.recipes: list[str] = []
        self.summary: Any = None

    def stepped(self, training: Any, result: Any) -> None:
        self.losses[training.counters.iteration] = result.loss
        self.scales[training.counters.iteration] = result.loss_scale
        self.recipes.append(training.run.recipe)

    def finished(self, training: Any) -> None:
        self.digest = digest(training)


class Loses(Hook):
    """The optimizer's states are zeros when the run goes on from step 3; the mean of its second moments until then, over all ranks, is among the notes."""

    def stepping(self, training: Any) -> None:
        if training.counters.iteration != 3:
            return
        states = [one for one in training.engine.tensors() if one.role in ("exp_avg", "exp_avg_sq")]
        second = torch.cat([one.tensor.detach().double().flatten() for one in states if one.role == "exp_avg_sq"])
        every = [(float(second.sum()), len(second))]
        if torch.distributed.is_initialized():
            every *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, every[0])
        sums, counts = zip(*every, strict=True)
        training.notes["mean second moment"] = sum(sums) / sum(counts)
        for one in states:
            one.tensor.zero_()


def go(made: Run, *hooks: Hook) -> Watch:
    """Trains, and what was seen."""
    from mpbridge.training.loop import pretrain

    watch = Watch()
    watch.summary = pretrain(made, dataset=Text(), hooks=[*hooks, watch], quiet=True)
    return watch


def job(size: int, folder: Path, *specs: Mapping[str, Any], timeout: float = 200.0) -> list[dict[str, Any]]:
    """What `size` processes make of `run(**spec)`, one after the other, with the hooks under 'hooks': losses, the digest of each rank, and notes.

    All ranks' output is shown on failure.
    """
    from tests.forked import codes, ranks, said

    out = folder / "job.json"
    with ranks(size, _rank, out, specs) as started:
        assert not any(codes(started, timeout)), said(started)
    seen: list[dict[str, Any]] = json.loads(out.read_text())
    return seen


def _rank(out: Path, specs: tuple[Mapping[str, Any], ...]) -> None:
    import torch.distributed as dist

    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False)
    seen = []
    for spec in specs:
        sections = dict(spec)
        hooks = sections.pop("hooks", ())
        watch = go(run(world=dist.get_world_size(), **sections), *hooks)
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, watch.digest)
        losses = {str(step): loss for step, loss in watch.losses.items()}
        notes = {name: value for name, value in watch.summary.notes.items() if isinstance(value, (str, float))}
        seen.append({"losses": losses, "digests": digests, "recipes": watch.recipes, "notes": notes})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    dist.barrier()
    stop_process_group()
