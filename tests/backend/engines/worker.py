"""One rank of a world that runs every scenario in turn, rebuilding the engine in one process; rank 0 writes what it saw as JSON.

Run by `world` below; `python worker.py OUT WEIGHTS` under torchrun's environment.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.worlds import reported

STEPS = 4
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
AWARE = {"use_precision_aware_optimizer": True}

UNTIED = {"share_embeddings_and_output_weights": False}
MOE = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP, DEEP = PP | {"virtual_pipeline_model_parallel_size": 2}, {"num_layers": 4}

SCENARIOS: dict[str, dict[str, Any]] = {
    "one": {},
    "one_untied": {"model": UNTIED},
    "one_deep": {"model": DEEP},
    "one_rms": {"model": {"normalization": "RMSNorm"}},
    "one_moe": {"model": MOE},
    "dp2": {},
    "dp2_overlap": {"ddp": {"overlap_grad_reduce": True}},
    # the mean over all tokens of all ranks is the mean of the ranks' means here: every rank has as many tokens
    "dp2_per_token": {"model": {"calculate_per_token_loss": True}},
    "dp2_sharded": {"ddp": {"use_distributed_optimizer": True}},
    "dp2_sharded_overlap": {"ddp": OVERLAP},
    "dp2_sharded_aware": {"ddp": OVERLAP, "optimizer": AWARE},
    "tp2": {"parallel": TP},
    "tp2_sp": {"parallel": TP | {"sequence_parallel": True}},
    "tp2_sp_rms": {"parallel": TP | {"sequence_parallel": True}, "model": {"normalization": "RMSNorm"}},
    "pp2": {"parallel": PP},
    "pp2_untied": {"parallel": PP, "model": UNTIED},
    "vpp2": {"parallel": VPP, "model": DEEP | {"overlap_p2p_comm": True, "batch_p2p_comm": False}},
    "vpp2_batched": {"parallel": VPP, "model": DEEP},
    "ep2": {"parallel": {"expert_model_parallel_size": 2}, "model": MOE},
    "ep2_sharded": {"parallel": {"expert_model_parallel_size": 2}, "model": MOE, "ddp": OVERLAP},
    "dp2_dist_muon": {"optimizer": {"optimizer": "dist_muon"}},
    "cp2": {"parallel": {"context_parallel_size": 2}},
}


WHOLE, SHARDED = ("dp2", "tp2", "tp2_sp", "pp2"), ("dp2_sharded", "dp2_sharded_overlap")
"""Layouts that read each other's checkpoints: megatron-core lays out optimizer states in one way with the distributed optimizer and in another without."""


def world(
    size: int, names: list[str], folder: Path, *, kinds: list[str], resume: bool = False, timeout: float = 840.0
) -> dict[str, Any]:
    """What `size` processes report for each 'name/kind'; both ranks' errors are shown when one fails."""
    more = ["resume"] if resume else []
    found: dict[str, Any] = reported(
        size, __file__, folder / f"world{size}.json", ",".join(names), ",".join(kinds), *more, timeout=timeout
    )
    return found


def _scenario(name: str, kind: str, weights: Path) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.mcore import McoreEngine
    from mpbridge.common.errors import Refused
    from tests.backend.engines import tiny

    with device_layer(False):
        try:
            engine = McoreEngine.build(tiny.run(kind, world=torch.distributed.get_world_size(), **SCENARIOS[name]))
        except Refused as refusal:
            return {"refused": str(refusal)}
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        if name.startswith("pp2") or name == "vpp2" or (torch.distributed.get_world_size() == 1):
            _same_start(engine, weights / f"{FAMILIES.get(name, 'tied')}.pt")
        batches = tiny.batches(rank=rank, size=size)
        results = [engine.train_step(batches, microbatches=4 // size) for _ in range(STEPS)]
        held = engine.evaluate(batches, microbatches=4 // size)
        names = [parameter for parameter, _ in engine.named_parameters()]
        engine.close()
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "held": held, "names": names}


def _resume(name: str, kind: str, folder: Path) -> dict[str, Any]:
    """Three steps, a checkpoint, two more; then an engine of every other layout takes the checkpoint and does those two."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.mcore import McoreEngine
    from tests import megatron_checkpoints
    from tests.backend.engines import tiny

    def go(engine: Any, skip: int, steps: int) -> list[float]:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        batches = tiny.batches(rank=rank, size=size)
        for _ in range(skip * 4 // size):
            next(batches)
        return [engine.train_step(batches, microbatches=4 // size).loss for _ in range(steps)]

    def build(scenario: str) -> Any:
        return McoreEngine.build(tiny.run(kind, world=torch.distributed.get_world_size(), **SCENARIOS[scenario]))

    place = folder / f"{name}_{kind}"
    if torch.distributed.get_rank() == 0:
        place.mkdir()
    torch.distributed.barrier()
    found: dict[str, Any] = {}
    with device_layer(False):
        engine = build(name)
        go(engine, 0, 3)
        megatron_checkpoints.save(engine.state(), place)
        found["straight"] = go(engine, 3, 2)
        final = {parameter: tensor.detach().clone() for parameter, tensor in engine.named_parameters()}
        engine.close()
        for other in (name,) if kind != "fp32" else WHOLE if name in WHOLE else SHARDED:
            engine = build(other)
            engine.load_state(dist_checkpointing.load(engine.state(loading=True), str(place)))
            found[other] = go(engine, 3, 2)
            if other == name:
                found["equal"] = all(torch.equal(tensor, final[one]) for one, tensor in engine.named_parameters())
            engine.close()
    return found


FAMILIES = {"one_rms": "rms", "one_moe": "moe"}
FAMILIES |= {"pp2_untied": "untied", "one_untied": "untied", "vpp2": "deep", "one_deep": "deep"}
"""Scenario -> its initial weights, by a file's stem; 'tied' where it is not named."""


def _same_start(engine: Any, file: Path) -> None:
    """A world of one writes its initial weights, pipeline stages (which draw theirs in another order) take them over."""
    import torch

    if torch.distributed.get_world_size() == 1:
        torch.save({name: parameter.detach().clone() for name, parameter in engine.named_parameters()}, file)
        return
    start = torch.load(file)
    for name, parameter in engine.named_parameters():
        # with tied embeddings the last stage holds a copy of the first one's
        tied = name not in start
        parameter.data.copy_(start["embedding.word_embeddings.weight" if tied else name])
    engine.optimizer.reload_model_params()


def main() -> None:
    out, names, kinds = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False, timeout_minutes=2)
    import torch

    do = _resume if len(sys.argv) > 4 else _scenario
    found = {f"{name}/{kind}": do(name, kind, out.parent) for name in names for kind in kinds}
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, found)
    if torch.distributed.get_rank() == 0:
        for key, row in found.items():
            row["all_names"] = [report[key].get("names", []) for report in reports]
            row["every"] = [report[key].get("losses") for report in reports]
        out.write_text(json.dumps(found))
    stop_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        print(f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
