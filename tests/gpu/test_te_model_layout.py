"""A GPU's Transformer Engine model and a CPU's local one store the same tensors under the same keys, so each reads the other's checkpoints.

Needs Transformer Engine, no GPU: modules are constructed on the CPU layer while torch claims a device; no kernel runs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def claim_a_hopper(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *args: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    )


def stored(run, monkeypatch, *, transformer_engine: bool) -> dict[str, tuple]:
    """Key -> (global shape, dtype) of every tensor that a checkpoint of the model would hold."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.backend.engines.parallel import ModelParallel
    from mpbridge.backend.megatron.targets import build_targets
    from mpbridge.backend.models.gpt import build_chunks

    with device_layer(False, fused_adam=CpuFusedAdam):
        parallel = ModelParallel(run.facts.parallel, seed=1)
        try:
            targets = build_targets(run, cuda=False)
            with monkeypatch.context() as inside:
                if transformer_engine:
                    claim_a_hopper(inside)
                model = build_chunks(targets.model, targets.gpt, run.policy, cuda=transformer_engine)[0]
            entries = model.module.sharded_state_dict().values()
            return {e.key: (tuple(e.global_shape), e.dtype) for e in entries if isinstance(e, ShardedTensor)}
        finally:
            parallel.stop()


@pytest.mark.parametrize("config", ["gpt_tiny", "moe_tiny"])
def test_both_models_store_the_same_tensors(config, transformer_engine, monkeypatch, world):
    from mpbridge.settings.container import ConfigContainer

    run = ConfigContainer.load(CONFIGS / f"{config}.yaml", ["mixed_precision=bf16_mixed"]).resolved(world_size=1)
    local = stored(run, monkeypatch, transformer_engine=False)
    assert stored(run, monkeypatch, transformer_engine=True) == local
    # the layers of a dense model are stored stacked
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} < set(local)
