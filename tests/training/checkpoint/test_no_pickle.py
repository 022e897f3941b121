"""No byte of a checkpoint reaches an unpickler, on any rank; whatever a stranger puts into its files, the answer is one line that names the file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import sys
import traceback
from pathlib import Path

import pytest
import torch

from mpbridge.common.errors import CheckpointError
from mpbridge.training.base import Counters
from mpbridge.training.checkpoint import io, store, writer
from mpbridge.training.checkpoint.format import COMMON, INDEX, METADATA, STATE, decoded, encoded
from mpbridge.training.checkpoint.reader import Contents
from mpbridge.training.checkpoint.verdict import FILE
from tests.forked import codes, ranks, said
from tests.training.checkpoint.hostile import Payload, forge, pickled, reseal, rewrite
from tests.training.survival import Hook, go, run

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """A checkpoint after one step."""
    folder = tmp_path_factory.mktemp("sealed")
    go(run("bf16_mixed", iters=1, checkpoint={"save": str(folder)}))
    return store.locate(folder)


@pytest.fixture
def place(sealed, tmp_path):
    """A copy of it, to be forged; the run's own name, so that it can be found."""
    return shutil.copytree(sealed, tmp_path / "kept" / sealed.name)


def look(place):
    """What a load does before it touches the engine."""
    io._look(place)
    with Contents(place) as contents:
        io._run_state(contents, Counters())
        for name in contents.index.objects:
            contents.object(type("Asked", (), {"unique_key": name, "data": None}))


def test_an_honest_checkpoint_passes_and_holds_no_pickle_of_ours(place):
    look(place)
    listed = set(store.check(place)["files"])
    assert listed == {METADATA, COMMON, writer.CONFIG, DATA, INDEX, STATE, FILE, store.CONFIG}


# --- the event that tells of an unpickler ------------------------------------------------------------------------------------------------


class Loads(Hook):
    """Notes where unpickling is under way while a checkpoint is loaded."""

    def __init__(self):
        self.found = []
        sys.addaudithook(self._note)
        for owner, name in ((torch, "load"), (torch._weights_only_unpickler, "load"), (pickle, "loads")):
            self._watch(owner, name)

    def _watch(self, owner, name):
        kept = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (self._note("called", name), kept(*args, **kwargs))[1])

    def _note(self, event, args):
        if event not in ("pickle.find_class", "called"):
            return
        stack = traceback.extract_stack()
        loading = any(frame.filename.endswith(("checkpoint/io.py", "checkpoint/reader.py")) for frame in stack)
        # torch's object collectives pickle what one rank of this run hands to another: no byte of a file
        collective = any(frame.name == "_tensor_to_object" for frame in stack)
        if loading and not collective:
            self.found.append(f"{event} {args}: {stack[-3].filename}:{stack[-3].lineno}")


def watched(folder, specs):
    """Each rank saves and resumes, and prints what it saw of unpicklers."""
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False)
    loads = Loads()
    for number, spec in enumerate(specs):
        kept = {"checkpoint": {"save": f"{folder}/{number}", "load": f"{folder}/{number}"}}
        world = int(os.environ["WORLD_SIZE"])
        go(run(world=world, iters=4, **spec, **kept, train={"exit_interval": 2}), loads)
        assert list(go(run(world=world, iters=3, **spec, **kept), loads).losses) == [3]
    pickle.loads(pickle.dumps(Path("/")))  # the control: outside of a load, so it is not counted
    print("found", loads.found, flush=True)
    stop_process_group()


SPECS = [
    {"recipe": "bf16_mixed", "ddp": {"use_distributed_optimizer": True}},
    {"recipe": {"recipe": "fp16_mixed", "initial_loss_scale": 4096.0}},
    {"recipe": {"recipe": "bf16_with_fp8_delayed_scaling_mixed", "fp8_param_gather": False}, "emulate": True},
    {"recipe": "bf16_params_fp32_states", "engine": "fsdp2"},
]


def test_nothing_is_unpickled_when_a_checkpoint_is_loaded_on_any_rank(tmp_path):
    with ranks(2, watched, str(tmp_path), SPECS) as both:
        assert not any(codes(both, 280)), said(both)
        for one in both:
            assert one.text.splitlines()[-1] == "found []", one.text


def resumed(place, name, mark):
    """Puts a payload into a file (rank 0 does) and resumes."""
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    start_process_group(False)
    world = int(os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == "0":
        forge(Path(place), name, pickled(mark))
    torch.distributed.barrier()
    try:
        print("losses", list(go(run("bf16_mixed", world=world, iters=2, checkpoint={"load": place})).losses))
    except CheckpointError as error:
        print("refused", error)
    stop_process_group()


@pytest.mark.parametrize("name", [METADATA, COMMON])
def test_files_for_other_tools_are_never_read_so_a_payload_in_them_sleeps(place, tmp_path, name):
    with ranks(2, resumed, str(place), name, tmp_path / "pwned") as both:
        assert not any(codes(both)), said(both)
        for one in both:
            assert "losses [2]" in one.text
    assert not (tmp_path / "pwned").exists()
    # the control: it acts where somebody does unpickle
    pickle.loads((place / name).read_bytes())
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", [STATE, INDEX, FILE, store.MANIFEST])
def test_a_payload_in_a_file_that_is_read_is_refused_by_name(place, tmp_path, name):
    (place / name).write_bytes(pickled(tmp_path / "pwned"))
    if name != store.MANIFEST:
        reseal(place)
    with pytest.raises(CheckpointError, match=f"{place / name} "):
        look(place)
    assert not (tmp_path / "pwned").exists()


def test_a_payload_in_an_object_is_refused_by_name(place, tmp_path):
    index = json.loads((place / INDEX).read_text())
    _, at, size = index["objects"]["rng/shard_0_1"]
    raw, data = pickled(tmp_path / "pwned"), bytearray((place / DATA).read_bytes())
    assert size > len(raw)
    data[at : at + size] = raw + bytes(size - len(raw))
    forge(place, DATA, bytes(data))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: rng/shard_0_1"):
        look(place)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_other_tools_read_the_tensors(place):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    with Contents(place) as contents:
        stored = dict(contents.index.tensors)
        mine = {key: torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for key, one in stored.items()}
        theirs = {key: torch.empty_like(tensor) for key, tensor in mine.items()}
        for key, tensor in mine.items():
            for piece in stored[key].pieces:
                assert contents._copy(piece, stored[key], tensor, (0,) * tensor.dim())
    dcp_load(theirs, storage_reader=FileSystemReader(place), no_dist=True)
    assert len(mine) > 20
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


# --- files that are not what they should be ----------------------------------------------------------------------------------------------


def as_link(file, outside):
    shutil.move(file, outside)
    file.symlink_to(outside)


def as_fifo(file, outside):
    file.unlink()
    os.mkfifo(file)


def as_socket(file, outside):
    file.unlink()
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(file.name)
    os.chdir(here)


def as_device(file, outside):
    file.unlink()
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("no right to make a device here")


def as_folder(file, outside):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("kind", "name"),  # one function opens them all
    [*((as_link, name) for name in (store.MANIFEST, FILE, INDEX, STATE, DATA, METADATA)), (as_fifo, store.MANIFEST), (as_socket, INDEX), (as_device, DATA), (as_folder, STATE)],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_a_file_of_another_kind_is_named_and_not_opened(place, tmp_path, name, kind):
    kind(place / name, tmp_path / "outside")
    with pytest.raises(CheckpointError, match="expected a regular file") as told:
        look(place)
    assert str(place / name) in str(told.value)


def test_a_folder_that_is_a_link_is_not_followed(place, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (place / "sub").symlink_to(tmp_path / "outside")
    manifest = json.loads((place / store.MANIFEST).read_text())
    manifest["files"]["sub/secret"] = store._facts(tmp_path / "outside" / "secret")
    (place / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="sub is a symbolic link"):
        store.check(place)


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "fifo", "folder"])
@pytest.mark.timeout(60)
def test_the_name_of_the_writer_is_not_written_through_a_link(tmp_path, kind):
    folder, outside = tmp_path / "kept", tmp_path / "precious"
    folder.mkdir()
    outside.write_text("precious")
    writer = folder / store.WRITER
    {
        "link": lambda: writer.symlink_to(outside),
        "dangling": lambda: writer.symlink_to(tmp_path / "new"),
        "hard link": lambda: os.link(outside, writer),
        "fifo": lambda: os.mkfifo(writer),
        "folder": writer.mkdir,
    }[kind]()
    with pytest.raises(CheckpointError, match=r"\.writer (is a|has a second name)"), store.claim(folder):
        pass
    assert outside.read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept", "precious"]


def test_a_place_that_takes_no_folder_is_named_with_its_setting():
    said = r"checkpoint\.save=/proc/x: .*expected a folder"
    with pytest.raises(CheckpointError, match=said), store.claim(Path("/proc/x")):
        pass


def test_latest_and_a_sealed_name_are_not_written_through_links(tmp_path):
    outside = tmp_path / "precious"
    outside.write_text("precious")
    folder = tmp_path / "kept"
    partial = store.begin(folder, 1)
    (folder / store.LATEST).symlink_to(outside)
    (folder / store.name_of(1)).symlink_to(tmp_path / "nowhere")
    (partial / "data").write_text("x")
    store.seal(partial, 1)
    assert outside.read_text() == "precious"
    assert store.check(folder / store.name_of(1))["step"] == 1


# --- JSON that is not what it should be --------------------------------------------------------------------------------------------------

DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("name", "text"),  # what is no JSON is found by the reader of all of them, what is of another kind by each one's own
    [(store.MANIFEST, DEEP), (FILE, '{"a":' * 100_000), (INDEX, "\xff"), (STATE, "{"), (INDEX, "1" * 10_000)]
    + [(name, text) for name in (store.MANIFEST, FILE, INDEX, STATE) for text in ("NaN", "null", "[]", '{"schema": 1}')],
)  # fmt: skip
def test_json_that_means_nothing_is_named(place, name, text):
    (place / name).write_text(text, encoding="latin-1")
    if name != store.MANIFEST:
        reseal(place)
    with pytest.raises(CheckpointError) as told:
        look(place)
    assert str(place / name) in str(told.value)
    assert len(str(told.value)) < 1000


def test_values_nested_deeply_in_the_state_are_refused(place):
    forge(place, STATE, '{"map":[["run",' + '{"tuple":[' * 100 + "]}" * 100 + "]]}")
    with pytest.raises(CheckpointError, match=f"{STATE} is refused: nested too deeply"):
        look(place)


def counters(**forged):
    def change(data):
        state = decoded(data)
        for name, value in forged.items():
            part, _, field = name.rpartition("__")
            inside = state["run"][part or "counters"]
            inside.pop(field) if value is None else inside.update({field: value})
        return encoded(state)

    return change


@pytest.mark.parametrize(
    "forged",
    [
        {"iteration": -5}, {"consumed": -5}, {"iteration": 10**30}, {"consumed": 10**15, "tokens": 10**16}, {"iteration": 2}, {"tokens": 1},
        {"iteration": True}, {"iteration": 1.0}, {"iteration": "1"}, {"iteration": None}, {"stop": 1}, {"data__consumed": -1}, {"data__mark": 3},
        {"scheduler__num_steps": -1}, {"skipped": [1]}, {"nonfinite": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_counters_that_no_run_counts_are_named(place, forged):
    rewrite(place, STATE, counters(**forged))
    with pytest.raises(CheckpointError, match=f"{STATE}[ :]"):
        look(place)


@pytest.mark.parametrize("step", [-5, 10**30, True, "1", None, 1.5])
def test_a_step_that_no_run_takes_is_named(place, step):
    manifest = json.loads((place / store.MANIFEST).read_text()) | {"step": step}
    (place / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{store.MANIFEST} has step"):
        look(place)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        pytest.param(("scheduler", "max_lr"), -1.0, id="rate below zero"),
        pytest.param(("scheduler", "max_lr"), "high", id="rate in words"),
        pytest.param(("scheduler", "lr_decay_steps"), torch.zeros(2), id="steps in a tensor"),
        pytest.param(("scheduler", "lr_warmup_steps"), float("nan"), id="nan"),
        pytest.param(("optimizer", "optimizer", "param_groups", 0, "lr"), float("inf"), id="group's rate"),
        pytest.param(("optimizer", "optimizer", "param_groups", 0, "step"), -3, id="group's step"),
    ],
)
def test_schedules_and_groups_with_numbers_that_none_can_hold_are_named(place, part, value):
    def change(data):
        state = decoded(data)
        at = state["run"] if part[0] == "scheduler" else state
        for name in part[:-1]:
            at = at[name]
        at[part[-1]] = value
        return encoded(state)

    rewrite(place, STATE, change)
    with pytest.raises(CheckpointError, match=f"{place / STATE}: "):
        go(run("bf16_mixed", iters=2, checkpoint={"load": str(place)}))


def first(index):
    return index["tensors"]["embedding.word_embeddings.weight"]


INDEXES = {
    "a file outside": lambda index: index["files"].append("../../secret"),
    "an absolute file": lambda index: index["files"].append("/etc/passwd"),
    "bytes past the end": lambda index: first(index)["pieces"][0].__setitem__(1, 10**9),
    "bytes before the start": lambda index: first(index)["pieces"][0].__setitem__(1, -8),
    "a file number that is none": lambda index: first(index)["pieces"][0].__setitem__(0, 7),
    "a negative file number": lambda index: first(index)["pieces"][0].__setitem__(0, -1),
    "a piece outside of its tensor": lambda index: first(index)["pieces"][0].__setitem__(2, [1, 0]),
    "a piece of another rank": lambda index: first(index)["pieces"][0].__setitem__(2, [0]),
    "a dtype that is none": lambda index: first(index).__setitem__("dtype", "load"),
    "a dtype that is no text": lambda index: first(index).__setitem__("dtype", ["float32"]),
    "a negative size": lambda index: first(index).__setitem__("shape", [-64, -64]),
    "a size beyond any memory": lambda index: first(index).__setitem__("shape", [2**47, 2**47]),
    "no shape": lambda index: first(index).pop("shape"),
    "an object past the end": lambda index: index["objects"]["rng/shard_0_1"].__setitem__(2, 10**12),
    "tensors that are a list": lambda index: index.__setitem__("tensors", []),
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_points_nowhere_is_named(place, change):
    rewrite(place, INDEX, change)
    with pytest.raises(CheckpointError, match=f"{place / INDEX} is refused: "):
        look(place)


def test_a_tensor_with_a_hole_is_an_error(place):
    rewrite(place, INDEX, lambda index: first(index)["pieces"].clear())
    with pytest.raises(CheckpointError, match=r"embedding\.word_embeddings\.weight has 0 elements, expected 4096"):
        go(run("bf16_mixed", iters=2, checkpoint={"load": str(place)}))


@pytest.mark.parametrize(
    "value",
    [1, -1.5, "text", None, True, [1, [2]], (1, (2, "x")), {"a": {1: 2.5}}, float("inf"), 1e-45, 2**70, {(1, 2): [()]}],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(value):
    found = decoded(json.loads(json.dumps(encoded(value), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)


def test_tensors_come_back_to_the_bit():
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.bool, torch.float8_e4m3fn):
        for shape in ((), (3,), (2, 0), (2, 3)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            found = decoded(json.loads(json.dumps(encoded({"t": tensor}))))["t"]
            assert found.dtype is dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.float(), tensor.float())


@pytest.mark.parametrize(
    "value",
    [Payload("x"), object(), {1, 2}, b"bytes", torch.float32, lambda: 1],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_not_saved(value):
    with pytest.raises(CheckpointError, match="not plain data"):
        encoded({"a": [value]})


@pytest.mark.parametrize("key", [[1], {"tuple": [[1]]}, {"map": []}])
def test_a_map_with_a_key_that_cannot_be_one_is_refused(key):
    with pytest.raises(CheckpointError, match="found a map with a"):
        decoded({"map": [[key, 2]]})
