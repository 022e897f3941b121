"""No file of a checkpoint can make code run: a payload in each, and the control that the payload works where nobody looks."""

from __future__ import annotations

import contextlib
import io
import os
import pickle

import pytest
import torch

from mpbridge.checkpoint import inspect as safe_load
from mpbridge.devices import device_layer
from mpbridge.errors import CheckpointError


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with device_layer(False):
        yield
    torch.distributed.destroy_process_group()


def contents(extra=None):
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0).view(2, 3)),
        "rng": ShardedObject("rng", {"state": torch.ones(2), "n": (1, "text")}, (1,), (0,)),
        "step": 3,
    } | (extra or {})


@pytest.fixture
def folder(group, tmp_path):
    from megatron.core import dist_checkpointing

    from mpbridge.checkpoint.writer import PlainSave

    made = tmp_path / "ckpt"
    made.mkdir()
    dist_checkpointing.save(contents(), str(made), sharded_strategy=PlainSave())
    return made


def test_an_honest_checkpoint_passes(folder):
    assert set(safe_load.inspect(folder).state_dict_metadata) == {"w", "rng/shard_0_1"}


def in_metadata(folder, payload):
    (folder / safe_load.METADATA).write_bytes(pickle.dumps(payload))


def in_metadata_field(folder, payload):
    data = safe_load.read_metadata(folder)
    data.planner_data = payload
    (folder / safe_load.METADATA).write_bytes(pickle.dumps(data))


def in_common(folder, payload):
    torch.save({"x": payload}, folder / safe_load.COMMON)


def in_object(folder, payload):
    """Puts the payload where the stored object was, at the end of its file."""
    data = safe_load.read_metadata(folder)
    index, info = next((i, s) for i, s in data.storage_data.items() if i.fqn.startswith("rng"))
    out = io.BytesIO()
    torch.save([payload], out)
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(out.getvalue())
    file.write_bytes(file.read_bytes() + out.getvalue())
    data.storage_data[index] = info
    (folder / safe_load.METADATA).write_bytes(pickle.dumps(data))


def in_stray_object(folder, payload):
    (folder / "rng").mkdir()
    torch.save(payload, folder / "rng" / "shard_0_1.pt")


def in_tensor(folder, payload):
    data = safe_load.read_metadata(folder)
    info = next(info for index, info in data.storage_data.items() if index.fqn == "w")
    out = io.BytesIO()
    torch.save(payload, out)
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(out.getvalue())
    file.write_bytes(file.read_bytes() + out.getvalue())
    (folder / safe_load.METADATA).write_bytes(pickle.dumps(data))


@pytest.mark.parametrize("where", [in_metadata, in_metadata_field, in_common, in_object, in_stray_object])
def test_a_payload_is_refused_and_does_not_run(folder, tmp_path, where):
    where(folder, Payload(tmp_path / "pwned"))
    with pytest.raises(CheckpointError, match="refused"):
        safe_load.inspect(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("where", [in_metadata, in_metadata_field, in_object])
def test_control_the_same_payload_runs_without_the_look(folder, tmp_path, where):
    from megatron.core import dist_checkpointing

    where(folder, Payload(tmp_path / "pwned"))
    with contextlib.suppress(
        BaseException
    ):  # whatever it dies of afterwards; torch's CheckpointException is no Exception
        dist_checkpointing.load(contents(), str(folder))
    assert (tmp_path / "pwned").exists()


def test_a_payload_in_a_tensor_is_stopped_by_torch_itself(folder, tmp_path):
    from megatron.core import dist_checkpointing

    in_tensor(folder, Payload(tmp_path / "pwned"))
    with pytest.raises(BaseException):  # noqa: B017, PT011
        dist_checkpointing.load(contents(), str(folder))
    assert not (tmp_path / "pwned").exists()


def test_metadata_that_points_outside_is_refused(folder):
    data = safe_load.read_metadata(folder)
    for info in data.storage_data.values():
        info.relative_path = "../secret"
    (folder / safe_load.METADATA).write_bytes(pickle.dumps(data))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        safe_load.inspect(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        safe_load.inspect(folder)


@pytest.mark.parametrize(
    "name",
    [
        ("os", "system"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("builtins", "eval"),
        ("pathlib", "os.system"),
    ],
)
def test_names_that_act_are_not_on_the_list(tmp_path, name):
    module, attribute = name
    text = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(attribute)])
        + attribute.encode()
        + b"\x93."
    )
    (tmp_path / safe_load.METADATA).write_bytes(text)
    with pytest.raises(CheckpointError, match="no writer of checkpoints needs"):
        safe_load.read_metadata(tmp_path)


def test_extra_state_is_read_through_the_list_too(group, tmp_path):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from mpbridge.checkpoint.writer import PlainSave

    raw = pickle.dumps({"recipe": Payload(tmp_path / "pwned")})
    state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    folder = tmp_path / "ckpt"
    folder.mkdir()
    dist_checkpointing.save(
        contents({"x": ShardedObject("layer._extra_state", state, (1,), (0,))}),
        str(folder),
        sharded_strategy=PlainSave(),
    )
    with pytest.raises(CheckpointError, match="no extra state"):
        safe_load.inspect(folder)
    assert not (tmp_path / "pwned").exists()
