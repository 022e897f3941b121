"""One rank of a world that trains emulated recipes in several layouts; rank 0 writes what all ranks saw as JSON.

Run by `world` below; `python worker.py OUT CASES` under torchrun's environment, a case being layout/recipe.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.worlds import reported

STEPS = 3
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
MOE = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
DEEP = {"num_layers": 3}  # tensorwise keeps a layer at each end high
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"model": DEEP},
    "tp2": {"parallel": TP, "model": DEEP},
    "sp2": {"parallel": TP | {"sequence_parallel": True}, "model": DEEP},
    "dp2": {"ddp": {"use_distributed_optimizer": True}, "model": DEEP},
    "pp2": {"parallel": PP, "model": {"share_embeddings_and_output_weights": False}},
    "ep2": {"parallel": {"expert_model_parallel_size": 2}, "model": MOE},
}


def world(size: int, cases: list[str], folder: Path, *, timeout: float = 840.0) -> dict[str, Any]:
    """What `size` processes report for each case; both ranks' errors are shown when one fails."""
    found: dict[str, Any] = reported(size, __file__, folder / f"world{size}.json", ",".join(cases), timeout=timeout)
    return found


def case(name: str) -> dict[str, Any]:
    """Losses, and the emulation's scales, of one case on this rank."""
    import torch
    from megatron.core import parallel_state

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    layout, _, recipe = name.partition("/")
    with device_layer(False):
        world = torch.distributed.get_world_size()
        engine: Any = build_engine(tiny.run(recipe, world=world, emulate=True, **LAYOUTS[layout]))
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        batches = tiny.batches(rank=rank, size=size)
        losses = [engine.train_step(batches, microbatches=4 // size).loss for _ in range(STEPS)]
        state = {key: tensor.tolist() for key, tensor in engine.emulation.state().items() if key != "step"}
        plugs = sorted(engine.emulation.plugs)
        engine.close()
    return {"losses": losses, "state": state, "plugs": plugs}


def main() -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False, timeout_minutes=2)
    import torch

    found = {name: case(name) for name in cases}
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, found)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps({name: [report[name] for report in reports] for name in cases}))
    stop_process_group()


if __name__ == "__main__":
    main()
