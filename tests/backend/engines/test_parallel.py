"""Process groups and megatron-core's parallel state come, are used again, and go."""

import os
import socket
from typing import Any

import numpy as np
import pytest
import torch

from mpbridge.backend.engines.base import ShardedEngine
from mpbridge.backend.engines.parallel import ModelParallel, start_process_group
from mpbridge.common.errors import BadValue
from mpbridge.common.facts import Parallel
from tests.forked import forked


def state() -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    return {
        f"{m.__name__}.{k}": v
        for m in (parallel_state, random)
        for k, v in vars(m).items()
        if k.startswith("_") and k.isupper() and not callable(v)
    }


def test_a_world_of_one_needs_no_port_and_is_joined_once(world: None) -> None:
    assert torch.distributed.get_world_size() == 1
    assert start_process_group(False) is False


def join() -> None:
    assert start_process_group(False)
    assert torch.distributed.get_world_size() == 1


def test_a_world_of_one_that_is_described_takes_no_port_either() -> None:
    """A script that a rank starts inherits the variables of the rank, which listens on the port that they name."""
    with socket.create_server(("", 0)) as held:
        port = str(held.getsockname()[1])
        job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with forked(join, environment=os.environ | job) as process:
            assert process.wait() == 0, process.text


def test_everything_that_megatron_core_keeps_is_put_back(layer: None) -> None:
    ModelParallel(Parallel(), seed=1).stop()
    before = state()
    parallel = ModelParallel(Parallel(), seed=1)
    during = state()
    assert during != before
    parallel.stop()
    assert state() == before


def test_the_groups_of_a_layout_are_used_again(layer: None) -> None:
    from megatron.core import parallel_state

    found = []
    for _ in range(3):
        parallel = ModelParallel(Parallel(), seed=1)
        found.append((parallel_state.get_data_parallel_group(), len(torch.distributed.distributed_c10d._world.pg_map)))
        parallel.stop()
    assert found[0] == found[1] == found[2]


def test_memory_buffers_do_not_outlive_an_engine(layer: None) -> None:
    from megatron.core import parallel_state

    parallel = ModelParallel(Parallel(), seed=1)
    parallel_state.get_global_memory_buffer().get_tensor((4,), torch.float32, "mpu")
    parallel.stop()
    parallel = ModelParallel(Parallel(), seed=1)
    assert not parallel_state.get_global_memory_buffer().buffer
    parallel.stop()


def test_there_is_one_at_a_time(layer: None) -> None:
    parallel = ModelParallel(Parallel(), seed=1)
    with pytest.raises(BadValue, match="close the other engine first"):
        ModelParallel(Parallel(), seed=1)
    parallel.stop()
    ModelParallel(Parallel(), seed=1).stop()


class Sharded(ShardedEngine):
    name = "sharded"

    def _build(self, backend: Any) -> None:
        self._parallel = ModelParallel(Parallel(), seed=1)


@pytest.mark.parametrize("part", ["backend.engines.base.forget_amaxes", "backend.engines.shard_state.forget_shardings"])
def test_an_engine_that_cannot_be_closed_whole_leaves_the_next_one_its_place(
    layer: None, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken() -> None:
        raise RuntimeError("a library says no")

    monkeypatch.setattr(f"mpbridge.{part}", broken)
    engine: Any = Sharded(None, cuda=False)
    engine._build(None)
    with pytest.raises(RuntimeError, match="a library says no"):
        engine.close()
    ModelParallel(Parallel(), seed=1).stop()


def test_a_seed_decides_every_generator(layer: None) -> None:
    def draw(seed: int) -> list[float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        parallel = ModelParallel(Parallel(), seed=seed)
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(1).item()
        drawn = [torch.rand(1).item(), float(np.random.rand()), forked]
        parallel.stop()
        return drawn

    assert draw(1) == draw(1)
    assert all(one != two for one, two in zip(draw(1), draw(2), strict=True))
    assert len(set(draw(1))) == 3


def test_variables_that_megatron_core_sets_for_attention_are_given_back(
    layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    parallel = ModelParallel(Parallel(), seed=1)
    os.environ |= {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1"}
    parallel.stop()
    assert os.environ["NVTE_FUSED_ATTN"] == "1"
    assert "NVTE_FLASH_ATTN" not in os.environ
