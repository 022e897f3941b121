"""Megatron-LM's examples/run_simple_mcore_train_loop.py under a witness, on a CPU: its model, its wrapper, its forward step, its optimizer and its
loop, as its `__main__` has them; batches of random tokens in the place of its mock dataset, which needs a compiled helper.

    MPBRIDGE_MEGATRON_LM=CHECKOUT[:WHAT ITS CORE NEEDS] python example_loop.py OUT.json [--mended]

--mended: with megatron-core's optimizer, which reads the gradients that the wrapper collects.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(1, os.environ["MPBRIDGE_MEGATRON_LM"].partition(os.pathsep)[0])
sys.path.append(os.environ["MPBRIDGE_MEGATRON_LM"].partition(os.pathsep)[2])

import torch

import mpbridge
from mpbridge.backend.devices import device_layer


def example(root: Path) -> Any:
    found = importlib.util.spec_from_file_location("example", root / "examples" / "run_simple_mcore_train_loop.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.device = torch.device("cpu")
    return module


def batches(length: int) -> Iterator[dict[str, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    source = torch.Generator().manual_seed(rank)
    mask = torch.ones(8, 1, length, length).triu(1).bool()
    while True:
        tokens = torch.randint(0, 100, (8, length), generator=source)
        places = torch.arange(length).expand(8, length)
        yield {"tokens": tokens, "labels": tokens, "attention_mask": mask, "position_ids": places, "loss_mask": torch.ones(8, length)}  # fmt: skip


def main() -> None:
    out, *rest = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    with device_layer(False):
        theirs = example(Path(sys.path[1]))
        theirs.parallel_state.initialize_model_parallel(1, 1)
        theirs.model_parallel_cuda_manual_seed(123)
        model = theirs.model_provider()
        ddp = theirs.DistributedDataParallelConfig(
            grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
        )
        model = theirs.DistributedDataParallel(config=model.config, ddp_config=ddp, module=model)
        optim = theirs.Adam(model.parameters())
        if "--mended" in rest:
            from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

            optim = get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0), [model])
        stream, forward_backward = batches(theirs._SEQUENCE_LENGTH), theirs.get_forward_backward_func()
        seen = mpbridge.witness(model, optim, at={2})
        for _ in range(2):
            with seen.step():
                if "--mended" in rest:
                    model.zero_grad_buffer()
                optim.zero_grad()
                forward_backward(
                    forward_step_func=theirs.forward_step_func, data_iterator=stream, model=model, num_microbatches=1, seq_length=theirs._SEQUENCE_LENGTH,
                    micro_batch_size=8, decoder_seq_length=theirs._SEQUENCE_LENGTH, forward_only=False,
                )  # fmt: skip
                theirs.finalize_model_grads([model])
                optim.step()
        if torch.distributed.get_rank() == 0:
            print(seen.report)
            Path(out).write_text(json.dumps(seen.report.as_data()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
