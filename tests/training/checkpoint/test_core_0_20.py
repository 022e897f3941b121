"""Checkpoints that megatron-core 0.20's own save wrote, which has no `common.pt`: what no rank shards is an object named `common_state`.

tests/golden/checkpoints_core_0.20.tar.xz holds two of them, of two tensors each: `lm` with the arguments of a Megatron-LM run, `plain` with plain values
alone. Written, with that version in front of the path, by: python -m tests.training.checkpoint.test_core_0_20
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import CheckpointError
from mpbridge.interop.stacks.importers import read_file
from mpbridge.training.checkpoint import reader
from mpbridge.training.checkpoint.format import decoded
from mpbridge.training.checkpoint.reader import Contents

SAVED = Path(__file__).parents[2] / "golden" / "checkpoints_core_0.20.tar.xz"
PLAIN = {"iteration": 3, "checkpoint_version": 3.0, "scheduler": {"max_lr": 1e-3, "num_steps": 6}}
RNG = [{"torch_rng_state": torch.arange(5, dtype=torch.uint8)}]


def weights() -> dict[str, torch.Tensor]:
    return {"decoder.weight": torch.arange(12.0).view(3, 4).bfloat16(), "optimizer.exp_avg": torch.arange(4.0) / 3}


def arguments() -> argparse.Namespace:
    return argparse.Namespace(
        bf16=True, params_dtype=torch.bfloat16, fp8="e4m3", fp8_recipe="blockwise", async_strategy="nvrx", iteration=3
    )


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(SAVED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", ["lm", "plain"])
def test_weights_are_converted_to_the_bit(theirs: Path, tmp_path: Path, name: str) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    assert reader.is_foreign(theirs / name)
    with Contents(reader.converted(theirs / name, tmp_path)) as contents:
        assert contents.index.tensors.keys() == weights().keys()
        for key, expected in weights().items():
            found = contents.tensor(ShardedTensor.from_rank_offsets(key, torch.empty_like(expected)))
            assert torch.equal(found, expected)


def test_what_no_rank_shards_is_converted_from_its_object(theirs: Path, tmp_path: Path) -> None:
    reader._run(theirs / "plain", tmp_path, "ours")
    assert decoded(json.loads((tmp_path / "state.json").read_text())) == PLAIN
    objects = json.loads((tmp_path / "index.json").read_text())["objects"]
    assert list(objects) == ["rng/shard_0_1"]


def test_objects_of_classes_are_refused_there_too(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is refused: it refers to argparse\.Namespace"):
        reader._run(theirs / "lm", tmp_path, "ours")


def test_arguments_of_a_run_are_imported(theirs: Path) -> None:
    for place in (theirs / "lm", theirs / "lm" / ".metadata"):
        assert read_file(place).fields["fp8_recipe"] == "blockwise"


def _write() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from mpbridge.backend.devices import device_layer
    from mpbridge.training.process import process_group
    from tests import megatron_checkpoints

    def state(common: dict[str, Any]) -> dict[str, Any]:
        tensors = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in weights().items()}
        return {"tensors": tensors, "rng": ShardedObject("rng", RNG, (1,), (0,))} | common

    with process_group(False), device_layer(False), tarfile.open(SAVED, "w:xz") as archive:
        for name, common in (("lm", PLAIN | {"args": arguments()}), ("plain", PLAIN)):
            folder = Path(tempfile.mkdtemp()) / name
            folder.mkdir()
            megatron_checkpoints.save(state(common), folder)
            for file in sorted(folder.iterdir()):
                content = file.read_bytes()
                entry = tarfile.TarInfo(f"{name}/{file.name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    _write()
