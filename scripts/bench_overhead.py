"""What mpbridge's loop costs: throughput of `pretrain` with everything on, against a bare megatron-core loop over the same configs.

    python scripts/bench_overhead.py [--config FILE] [--recipe NAME] [--rounds N] [key=value ...]

Arms: ours (metrics, TensorBoard, progress, audit, hooks), bare (megatron-core's schedule, optimizer and scheduler in ten lines, the same
modules), bare again (the A/A ratio). All three train their own copy of the model on the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from arms import Turns, bench, ratio, report

from mpbridge.train.hooks import Training
from mpbridge.train.lr import scheduler_arguments


class Bare:
    """A megatron-core training loop without mpbridge around it."""

    def __init__(self, training: Training) -> None:
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mpbridge.engines.configs import build_targets
        from mpbridge.engines.model import build_chunks

        run = training.run
        self.run, self.size = run, int(run.train["global_batch_size"])
        targets = build_targets(run, cuda=False)
        chunks = build_chunks(targets.model, targets.gpt, run.policy, cuda=False)
        self.model = DistributedDataParallel(targets.model, targets.ddp, chunks[0])
        self.optimizer = get_megatron_optimizer(targets.optimizer, [self.model])
        arguments = scheduler_arguments(run)
        for group in self.optimizer.param_groups:
            group["min_lr"] = arguments["min_lr"]
        self.schedule = OptimizerParamScheduler(self.optimizer, **arguments)
        targets.model.grad_scale_func, targets.model.finalize_model_grads_func = self.optimizer.scale_loss, finalize_model_grads
        self.forward_backward = get_forward_backward_func()
        self.data = self.batches(training)

    def batches(self, training: Training) -> Iterator[dict[str, torch.Tensor]]:
        """The same text through torch's DataLoader."""
        dataset = training.feed.corpus.dataset("train", self.size * int(self.run.train["train_iters"]))
        while True:
            yield from torch.utils.data.DataLoader(dataset, batch_size=int(self.run.train["micro_batch_size"]))

    def forward(self, data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        """megatron-core's forward_step_func."""
        batch = next(data)
        losses, mask = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), batch["loss_mask"].view(-1)

        def mean(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (out.float().view(-1) * mask).sum() / mask.sum()
            return loss, {"loss": loss.detach().clone()}

        return losses, mean

    def step(self) -> float:
        """One step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward(
            forward_step_func=self.forward,
            data_iterator=self.data,
            model=self.model,
            num_microbatches=self.size // int(self.run.train["micro_batch_size"]),
            seq_length=self.run.facts.shape.seq_length,
            micro_batch_size=int(self.run.train["micro_batch_size"]),
            forward_only=False,
        )
        applied, _, _ = self.optimizer.step()
        if applied:
            self.schedule.step(self.size)
        return sum(loss["loss"].item() for loss in losses) / len(losses)


def main() -> None:
    """Runs and prints."""
    turns = Turns(lambda training: {name: Bare(training).step for name in ("bare", "bare again")})
    seconds = bench(__doc__, turns)
    ratios = {
        "ours / bare (throughput; at least 0.98)": ratio(seconds, "bare", "ours"),
        "bare again / bare (A/A)": ratio(seconds, "bare", "bare again"),
    }
    report("overhead of mpbridge's loop", turns, ratios)


if __name__ == "__main__":
    main()
