"""A megatron-core training loop without mpbridge: the arm that bench_overhead.py and bench_gpu.py compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class BareLoop:
    """megatron-core's model, wrapper, optimizer, scheduler and schedule with the same configs, in a minimal loop.

    Needs a process group, an engine's parallel state (or its own), and on a CPU the device layer. data: endless micro-batches.
    """

    def __init__(self, run: Any, data: Iterator[Mapping[str, torch.Tensor]], *, cuda: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mpbridge.backend.megatron.targets import build_targets
        from mpbridge.backend.models.gpt import build_chunks
        from mpbridge.settings.training import scheduler_arguments

        self.run, self.data, self.cuda = run, data, cuda
        targets = build_targets(run, cuda=cuda)
        chunks = build_chunks(targets.model, targets.gpt, run.policy, cuda=cuda)
        self.model = DistributedDataParallel(targets.model, targets.ddp, chunks[0])
        self.optimizer = get_megatron_optimizer(targets.optimizer, [self.model])
        arguments = scheduler_arguments(run)
        for group in self.optimizer.param_groups:
            group["min_lr"] = arguments["min_lr"]
        self.scheduler = OptimizerParamScheduler(self.optimizer, **arguments)
        targets.model.grad_scale_func, targets.model.finalize_model_grads_func = (
            self.optimizer.scale_loss,
            finalize_model_grads,
        )
        self.forward_backward = get_forward_backward_func()
        self.global_batch = int(run.train["global_batch_size"])
        self.microbatches = self.global_batch // int(run.train["micro_batch_size"])

    def forward(self, data: Iterator[Mapping[str, torch.Tensor]], model: Any) -> Any:
        """megatron-core's forward_step_func."""
        batch = next(data)
        if self.cuda:
            batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
        losses, mask = (
            model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]),
            batch["loss_mask"].view(-1),
        )

        def mean(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = (out.float().view(-1) * mask).sum() / mask.sum()
            return loss, {"loss": loss.detach().clone()}

        return losses, mean

    def step(self) -> float:
        """One step; the mean loss in nats per token."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward(
            forward_step_func=self.forward,
            data_iterator=self.data,
            model=self.model,
            num_microbatches=self.microbatches,
            seq_length=self.run.facts.shape.seq_length,
            micro_batch_size=int(self.run.train["micro_batch_size"]),
            forward_only=False,
        )
        applied, _, _ = self.optimizer.step()
        if applied:
            self.scheduler.step(self.global_batch)
        return sum(loss["loss"].item() for loss in losses) / len(losses)
