"""Megatron-FSDP in one process: weights move, one master copy, one truth for gradients, dtypes mapped or refused."""

from typing import Any

import pytest
import torch

from mpbridge.backend.engines.megatron_fsdp import _sections
from mpbridge.common.errors import Contradiction, Refused
from tests.backend.engines import tiny

CORE = "megatron_fsdp"


@pytest.fixture
def build(engines: Any) -> Any:
    return lambda kind="bf16_megatron_fsdp", **more: engines(kind, engine=CORE, **more)


def _moved(engine: Any, steps: int = 1) -> float:
    before = {name: p._local_tensor.clone() for name, p in engine.named_parameters()}
    tiny.losses(engine, steps)
    return max(float((p._local_tensor - before[name]).abs().max()) for name, p in engine.named_parameters())


def test_m1_weights_move_with_a_precision_aware_optimizer(build: Any) -> None:
    engine = build()
    assert engine.run.policy.precision_aware
    # Adam's first update is the learning rate
    assert _moved(engine) == pytest.approx(1e-3, rel=0.05)


def test_m1_upstreams_own_wiring_moves_nothing(layer: None) -> None:
    """Why the engine does not use megatron-core 0.16.1's factory: if this fails, upstream has mended it."""
    from functools import partial

    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mpbridge.backend.engines.base import forward_step
    from mpbridge.backend.engines.parallel import ModelParallel
    from mpbridge.backend.megatron.inside_fsdp import do_not_reduce, indexed_device
    from mpbridge.backend.megatron.targets import build
    from mpbridge.backend.models.gpt import build_chunks

    run = tiny.run("bf16_megatron_fsdp", engine=CORE)
    targets = build(_sections(run, cuda=False), run.plan)
    parallel = ModelParallel(run.facts.parallel, seed=1)
    with indexed_device(False):
        (chunk,) = build_chunks(targets.model, targets.gpt, run.policy, cuda=False)
        wrapped = FullyShardedDataParallel(targets.model, targets.ddp, chunk, device=torch.device("cpu"))
        do_not_reduce(wrapped)
        optimizer = get_megatron_optimizer(targets.optimizer, [wrapped])
        targets.model.finalize_model_grads_func = finalize_model_grads
        named = wrapped.param_and_grad_buffer.optimizer_named_parameters
        before = [p._local_tensor.clone() for _, p in named]
        wrapped.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, torch.device("cpu")), data_iterator=tiny.batches(), model=wrapped,
            num_microbatches=1, seq_length=tiny.SEQ, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        assert any(p.grad is not None and bool(p.grad._local_tensor.any()) for _, p in named), "gradients are there"
        optimizer.step_with_ready_grads()
        assert all(torch.equal(p._local_tensor, old) for (_, p), old in zip(named, before, strict=True)), (
            "and nobody reads them"
        )
    parallel.stop()


SCALINGS = (None, "delayed", "tensorwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("aware", [False, True], ids=["plain", "aware"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_m3_nobody_waits_for_a_decoupled_gradient(build: Any, scaling: str | None, aware: bool) -> None:
    quantized = {"fp8": "hybrid", "fp8_recipe": scaling} if scaling else {}
    engine = build(
        {"recipe": "bf16_megatron_fsdp", "use_precision_aware_optimizer": aware, **quantized}, emulate=bool(scaling)
    )
    flags = {
        "fused": any(getattr(part, "use_decoupled_grad", False) for part in engine.optimizer.parts),
        "masters": any(getattr(part, "master_weights", False) for part in engine.optimizer.parts),
        "buffer": getattr(engine.model[0].param_and_grad_buffer, "use_precision_aware_optimizer", False),
        "clipping": engine.configs.optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
    }
    assert flags == dict.fromkeys(flags, False)
    engine.train_step(tiny.batches(), microbatches=1)
    assert all(shard.grad is not None for shard in engine.optimizer.shards.values())


NARROW: dict[str, object] = {"grad_reduce_in_fp32": False}
PLAIN = dict.fromkeys(("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
PLAIN |= {"use_precision_aware_optimizer": False}


@pytest.mark.parametrize(
    ("changes", "dtypes"),
    [({}, ("bf16", "fp32", "fp32")), (NARROW, ("bf16", "fp32", "bf16")), (NARROW | PLAIN, ("bf16", None, "bf16"))],
    ids=["fp32 gradients: 2+4+4", "bf16 gradients: 2+4+2", "no main weights: 2+0+2"],
)
def test_m6_main_weights_and_gradients_have_the_dtypes_asked_for(build: Any, changes: Any, dtypes: Any) -> None:
    engine = build({"recipe": "bf16_megatron_fsdp", "exp_avg_dtype": None, "exp_avg_sq_dtype": None, **changes})
    from mpbridge.numerics.observation.tensors import storage

    found: dict[str, str] = {}
    for live in engine.tensors():
        found.setdefault(live.role, storage(live.tensor))
    assert (found["params"], found.get("main_params"), found["grads"]) == dtypes
    assert _moved(engine, 2) > 0
    copied = {storage(live.tensor) for live in engine.tensors() if live.role == "main_grads"}
    assert copied == ({"fp32"} if dtypes == ("bf16", "fp32", "bf16") else set()), (
        "what the optimizer reads is a copy only between two dtypes"
    )


def test_m7_the_distributed_optimizer_is_switched_on_and_nonsense_refused(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build().configs.ddp.use_distributed_optimizer is True
    with pytest.raises(Contradiction, match="always shards the states"):
        build(ddp={"use_distributed_optimizer": False})
    with pytest.raises(Refused, match="optimizer-that-the-engine-does-not-build"):
        build(optimizer={"optimizer": "muon"})


def test_m8_a_checkpoint_with_a_duplicate_master_loads_and_the_duplicate_is_dropped(build: Any) -> None:
    engine = build()
    tiny.losses(engine, 2, 1)
    saved = {name: shard.detach().clone() for name, shard in engine.optimizer.shards.items()}
    state = _plain(engine.state())
    # what FusedAdam's second copy would have left in an old checkpoint: stale, never read
    state["optimizer"]["master_param"] = {name: torch.zeros_like(value) for name, value in saved.items()}
    tiny.losses(engine, 2, 1)
    engine.load_state(state)
    assert all(torch.equal(shard, saved[name]) for name, shard in engine.optimizer.shards.items())
    assert all("master_param" not in one for part in engine.optimizer.parts for one in part.state.values())


def _plain(state: Any) -> Any:
    """Sharded tensors replaced by copies of what they hold."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.data.clone() if hasattr(state, "global_shape") else state


def test_one_process_gradients_are_not_doubled(engines: Any) -> None:
    found = []
    for name in ("mcore", CORE):
        engine, batches = engines("fp32", engine=name), tiny.batches()
        results = [engine.train_step(batches, microbatches=3) for _ in range(2)]
        found.append([number for result in results for number in (result.loss, result.grad_norm)])
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=1e-6)
