"""Compares mpbridge with a GPT of the same shape in plain PyTorch: same threads, same text, same optimizer, same precision.

    python scripts/evidence/bench_peer.py [--config FILE] [--recipe NAME] [--rounds N] [key=value ...]

Arms: ours (`pretrain` with everything on: megatron-core's model, wrapper, optimizer and schedule, metrics, audit), plain (plain_gpt.py: BF16
weights, FP32 gradients and main weights, scaled_dot_product_attention, clipping), plain again (the A/A ratio).
"""

from __future__ import annotations

from itertools import islice

from arms import Turns, bench, ratio, report
from plain_gpt import PlainGPT, PlainTrainer

from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.training.base import Training


class Plain:
    """One step of the plain script on its own copy of the model."""

    def __init__(self, training: Training) -> None:
        run = training.run
        options = run.inputs["optimizer"]
        model = PlainGPT(run.facts.shape, rope=run.inputs["model"].get("position_embedding_type") == "rope")
        self.trainer = PlainTrainer(
            model,
            run.policy.compute.torch(),
            CpuFusedAdam,
            lr=options["lr"],
            weight_decay=options.get("weight_decay", 0.01),
            clip=options.get("clip_grad", 1.0),
        )
        self.parameters = sum(parameter.numel() for parameter in self.trainer.main)
        self.microbatches = int(run.train["global_batch_size"]) // int(run.train["micro_batch_size"])
        self.data = training.feed.batches("train")

    def step(self) -> float:
        """One step."""
        return self.trainer.step(list(islice(self.data, self.microbatches)))


def arms(training: Training) -> dict[str, object]:
    """Two plain arms, checked to have the same number of parameters as ours."""
    plain = {name: Plain(training) for name in ("plain", "plain again")}
    ours = sum(tensor.numel() for _, tensor in training.engine.named_parameters())
    if plain["plain"].parameters != ours:
        raise SystemExit(
            f"the shapes differ: {ours:,} parameters of ours, {plain['plain'].parameters:,} of the plain model"
        )
    return {name: arm.step for name, arm in plain.items()}


def main() -> None:
    """Runs the benchmark and prints the ratios."""
    turns = Turns(arms)
    seconds = bench(__doc__, turns)
    ratios = {
        "ours / plain (throughput; at least 1.0)": ratio(seconds, "plain", "ours"),
        "plain again / plain (A/A)": ratio(seconds, "plain", "plain again"),
    }
    report("mpbridge and plain PyTorch", turns, ratios)


if __name__ == "__main__":
    main()
