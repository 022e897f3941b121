"""Checkpoints that hold pickles: megatron-core's own, and those of schema 1. Converted elsewhere, to the bit; a payload is refused by its file's name."""

from __future__ import annotations

import ctypes
import io as streams
import json
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from mpbridge.common import safe_unpickler
from mpbridge.common.errors import CheckpointError, Refused
from mpbridge.common.safe_unpickler import UnpickledCall, read
from mpbridge.training.checkpoint import archive as archived
from mpbridge.training.checkpoint import extra_state, io, reader, state, store
from mpbridge.training.checkpoint.archive import load, plain_call
from mpbridge.training.checkpoint.format import decoded, encoded
from mpbridge.training.checkpoint.verdict import FILE
from tests import megatron_checkpoints
from tests.forked import codes, ranks, said
from tests.light import loaded_by
from tests.training.checkpoint.hostile import Payload, forge, pickled
from tests.training.survival import Hook, go, run

METADATA, COMMON = ".metadata", "common.pt"


class InTheirFormat(Hook):
    """Saves after step 2 as megatron-core's dist_checkpointing does; schema 1 of mpbridge put its own files beside that."""

    def __init__(self, folder, schema):
        self.folder, self.schema, self.place = folder, schema, None

    def stepped(self, training, result):
        if training.counters.iteration != 2:
            return
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        contents = io.gather(training)
        made_by_te = torch.frombuffer(bytearray(TE_STATE), dtype=torch.uint8)
        contents["extra"] = ShardedObject("layer._extra_state", made_by_te, (1,), (0,))
        self.place = self.folder / store.name_of(2)
        self.place.mkdir(parents=True)
        stored = state.stored_dtypes(contents)
        megatron_checkpoints.save(contents, self.place)
        if self.schema is None:
            return
        (self.place / FILE).write_text(json.dumps(io.of_run(training.run, stored).as_data() | {"step": 2}))
        files = {file.name: store._facts(file) for file in self.place.iterdir()}
        (self.place / store.MANIFEST).write_text(json.dumps({"schema": 1, "step": 2, "files": files}))


class Recipe:
    """Stands for Transformer Engine's, which is not installed everywhere: pickled under its name."""

    def __init__(self):
        self.margin, self.amax_history_len = 0, 16


def te_state():
    """What TransformerEngineBaseModule.get_extra_state pickles: tensors by way of their storages, and the recipe object."""
    tensors = {"scale_fwd": torch.arange(3.0), "amax_history_fwd": torch.arange(6.0).view(2, 3).t()}
    return pickle.dumps(tensors | {"recipe": Recipe(), "extra_fp8_variables": {"num_gemms": 1}}).replace(
        b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x94\x8c\x06Recipe",
        b"\x8c\x20transformer_engine.common.recipe\x94\x8c\x0eDelayedScaling",
    )


def framed(raw):
    """A pickle of protocol 4 without its frame, whose length a replacement has changed."""
    return raw[:2] + raw[11:] if raw[2:3] == b"\x95" else raw


TE_STATE = framed(te_state())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(checkpoint of schema 1, checkpoint of another program), both after step 2 of the same run; losses of the whole run."""
    folder = tmp_path_factory.mktemp("theirs")
    ours, strangers = InTheirFormat(folder / "ours", 1), InTheirFormat(folder / "strangers", None)
    losses = go(run("bf16_mixed", iters=4), ours, strangers).losses
    return ours.place, strangers.place, losses


@pytest.fixture
def place(theirs, tmp_path):
    """A copy of the checkpoint of schema 1, to be forged."""
    return shutil.copytree(theirs[0], tmp_path / "kept" / theirs[0].name)


def test_a_checkpoint_of_schema_1_resumes_to_the_bit_and_stays_as_it_is(theirs, place):
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    watch = go(run("bf16_mixed", iters=4, checkpoint={"load": str(place)}))
    assert watch.losses == {step: theirs[2][step] for step in (3, 4)}
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert [entry.name for entry in place.parent.iterdir()] == [place.name]


def test_its_verdict_is_the_same_and_the_run_saves_beside_it(place):
    kept = {"save": str(place.parent), "load": str(place.parent), "accept": "bf16_mixed"}
    watch = go(run("fp32", iters=3, checkpoint=kept))
    assert list(watch.losses) == [3]
    schemas = {entry.step: store.read_manifest(entry.path)["schema"] for entry in store.saved(place.parent)}
    assert schemas == {3: 2, 2: 1}
    assert not list(place.parent.glob(".converted-*"))


def test_weights_of_another_programs_checkpoint_are_taken_when_asked_for(theirs):
    with pytest.raises(Refused, match="was not written by mpbridge"):
        go(run("bf16_mixed", iters=1, checkpoint={"load": str(theirs[1])}))
    watch = go(run("bf16_mixed", iters=1, checkpoint={"load": str(theirs[1]), "reset_optimizer": True}))
    assert list(watch.losses) == [1]
    assert watch.losses[1] < theirs[2][1] - 0.1  # trained weights, on the first batch again


# --- payloads ----------------------------------------------------------------------------------------------------------------------------

D1 = (
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\nN}\x8c\x08__name__"
    b"\x8c\x15TensorStorageMetadatas\x86b0"
)
"""BUILD with a slot state: sets an attribute of a class that every allow-list knows."""


def archive_with(value, pickle_bytes=None):
    """torch.save's archive of `value`, its pickle replaced."""
    out, changed = streams.BytesIO(), streams.BytesIO()
    torch.save(value, out)
    if pickle_bytes is None:
        return out.getvalue()
    with zipfile.ZipFile(out) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, pickle_bytes if info.filename.endswith("data.pkl") else old.read(info))
    return changed.getvalue()


def in_object(place, key, raw):
    """Puts `raw` where an object of the checkpoint lies: at the end of its file, with torch's own table pointing there."""
    with (place / METADATA).open("rb") as stream:
        data = pickle.load(stream)
    index, info = next((index, info) for index, info in data.storage_data.items() if index.fqn.startswith(key))
    file = place / info.relative_path
    info.offset, info.length = file.stat().st_size, len(raw)
    data.storage_data[index] = info
    with file.open("ab") as stream:
        stream.write(raw)
    forge(place, METADATA, pickle.dumps(data))
    return info.relative_path


def metadata_of(place):
    return (place / METADATA).read_bytes()


def common_state(place, raw):
    """Puts `raw` where megatron-core's save keeps what no rank shards: a file of its own, in 0.20 an object."""
    if not (place / COMMON).exists():
        return in_object(place, "common_state", raw)
    forge(place, COMMON, raw)
    return COMMON


def a_field_of_the_table(place, mark):
    data = pickle.loads(metadata_of(place))
    data.planner_data = Payload(mark)
    return pickle.dumps(data)


def build_of_a_class(place, mark):
    in_object(place, "rng", archive_with([Payload(mark)]))
    return D1 + metadata_of(place)[2:]


def loaded_from(raw):
    """A pickle that asks torch to load these bytes."""
    return b"\x80\x04ctorch.storage\n_load_from_bytes\nB" + len(raw).to_bytes(4, "little") + raw + b"\x85R."


def older_form(value):
    out = streams.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def of_bytes(raw):
    return archive_with([torch.frombuffer(bytearray(raw), dtype=torch.uint8)])


RECIPE = b"\x8c\x20transformer_engine.common.recipe\x94\x8c\x0eDelayedScaling"
TABLES = {
    "BUILD of a class": build_of_a_class,
    "REDUCE in the table": lambda place, mark: pickled(mark),
    "REDUCE before the table": lambda place, mark: b"\x80\x04" + f"cos\nmkdir\n(S'{mark}'\ntR0".encode() + metadata_of(place)[2:],
    "a field of the table": a_field_of_the_table,
    "an instance": lambda place, mark: b"\x80\x02" + f"(S'{mark}'\nios\nmkdir\n.".encode(),
    "an object": lambda place, mark: b"\x80\x02(cos\nmkdir\n" + f"S'{mark}'\no.".encode(),
    "an extension": lambda place, mark: b"\x80\x02\x82\x01)R.",
    "a dotted name": lambda place, mark: b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93\x8c" + bytes([len(str(mark))]) + str(mark).encode() + b"\x85R.",
}  # fmt: skip
"""What stands in the place of torch's table."""
OBJECTS = {
    "the random states": ("rng", lambda mark: archive_with([Payload(mark)])),
    "a tensor": ("optimizer.state.exp_avg.embedding", lambda mark: archive_with(Payload(mark))),
    "a persistent id": ("rng", lambda mark: archive_with([torch.ones(1)], b"\x80\x02(X\x07\x00\x00\x00storage" + pickled(mark)[2:-1] + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ.")),
    "an archive in a pickle": ("rng", lambda mark: archive_with([1], loaded_from(archive_with(Payload(mark))))),
    "an older form in a pickle": ("rng", lambda mark: archive_with([1], loaded_from(older_form(Payload(mark))))),
    "the extra state": ("layer._extra_state", lambda mark: of_bytes(pickled(mark))),
    "the recipe of the extra state": ("layer._extra_state", lambda mark: of_bytes(TE_STATE.replace(RECIPE, b"\x8c\x02os\x94\x8c\x05mkdir"))),
    "the common state": (None, lambda mark: archive_with({"run": Payload(mark)})),
    "the common state, bare": (None, pickled),
}  # fmt: skip
"""What stands in the place of an object or a tensor (None: the common state)."""


def plant(route, place, mark):
    """Plants a payload; returns the file that holds it."""
    if route in TABLES:
        forge(place, METADATA, TABLES[route](place, mark))
        return METADATA
    key, made = OBJECTS[route]
    return common_state(place, made(mark)) if key is None else in_object(place, key, made(mark))


@pytest.mark.parametrize("route", [*TABLES, *OBJECTS])
def test_a_payload_is_refused_by_its_file_and_does_not_run(place, tmp_path, route):
    name = plant(route, place, tmp_path / "pwned")
    (tmp_path / "room").mkdir()
    with pytest.raises(CheckpointError, match="refused") as told:
        reader.converted(place, tmp_path / "room")
    assert str(told.value).startswith(str(place / name))
    assert "\n" not in str(told.value)
    assert not (tmp_path / "pwned").exists()
    assert not list((tmp_path / "room").iterdir())


@pytest.mark.parametrize("route", [*TABLES][:4])
def test_control_the_payload_acts_in_an_unpickler(place, tmp_path, route):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    plant(route, place, tmp_path / "pwned")
    try:
        pickle.loads(metadata_of(place))
        assert (tmp_path / "pwned").exists() or BytesStorageMetadata.__name__ == "TensorStorageMetadata"
    finally:
        BytesStorageMetadata.__name__ = "BytesStorageMetadata"


def loading(place):
    from mpbridge.training.process import process_group

    with process_group(False):
        try:
            go(run("bf16_mixed", world=2, iters=3, checkpoint={"load": place}))
        except CheckpointError as error:
            print("refused", error)


def test_every_rank_ends_with_the_line(place, tmp_path):
    plant("the random states", place, tmp_path / "pwned")
    with ranks(2, loading, str(place)) as both:
        assert not any(codes(both)), said(both)
        for one in both:
            assert f"refused {place}/__0_0.distcp is refused: it refers to posix.mkdir" in one.text
    assert not (tmp_path / "pwned").exists()


# --- the interpreter, the process --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b"]]a",
        b"h\x07.",
        b"(.",
        b"\x80\x04K\x01K\x02a.",
        b"N}b.",
        b"K\x01}b.",
        b"cos\nsystem\n}b.",
        b"\x8a\xff",
        b"}]Ns.",
    ],
    ids=repr,
)
def test_a_damaged_pickle_is_an_error_of_ours(raw):
    def nothing(name, args):
        raise CheckpointError("no")

    with pytest.raises(CheckpointError):
        read(raw, nothing)


def test_names_stand_for_themselves():
    found, end = read(pickled("x"), lambda name, args: UnpickledCall(name, args))
    assert (str(found.name), found.args) == ("posix.mkdir", ("x",))
    assert end == len(pickled("x"))


@pytest.mark.parametrize(
    "loader", ["torch.storage\n_load_from_bytes", "megatron.core.safe_globals\nsafe_load_from_bytes"]
)
def test_a_tensor_in_a_pickle_is_read_whoever_is_to_load_its_storage(loader):
    raw = pickle.dumps(torch.arange(3.0), protocol=3)
    for written in ("torch.storage\n_load_from_bytes", "megatron.core.safe_globals\nsafe_load_from_bytes"):
        raw = raw.replace(f"c{written}\n".encode(), f"c{loader}\n".encode())
    assert f"c{loader}\n".encode() in raw
    found, _ = read(raw, plain_call())
    assert found.dtype == "float32"
    assert found.content() == torch.arange(3.0).numpy().tobytes()


def test_references_without_an_end_are_refused(monkeypatch):
    monkeypatch.setattr(archived, "MOST", 100_000)
    spelled = archived.spelled
    laughs = [1]
    for _ in range(40):
        laughs = [laughs, laughs]
    with pytest.raises(CheckpointError, match="more than"):
        spelled(laughs)
    laughs.append(laughs)
    with pytest.raises(CheckpointError, match="endlessly"):
        spelled(laughs)


TWICE = b")" + b"2\x86" * 60
"""A tuple that holds one tuple twice, which holds another twice: 2**60 elements in 121 bytes."""


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x02}" + TWICE + b"Ns.", id="a key"),
        pytest.param(b"\x80\x02}(" + TWICE + b"Nu.", id="keys"),
        pytest.param(b"\x80\x02(" + TWICE + b"Nd.", id="a dict"),
        pytest.param(
            b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + TWICE + b"X\x03\x00\x00\x00cpuK\x01tQ.",
            id="a storage",
        ),
    ],
)
def test_tuples_of_one_another_are_one_error_at_once(pickled):
    with pytest.raises(CheckpointError, match="tuples nested too deep"):
        safe_unpickler.read(pickled, lambda name, args: safe_unpickler.UnpickledCall(name, args), lambda key: None)


def archive(pickled):
    made = streams.BytesIO()
    with zipfile.ZipFile(made, "w") as inside:
        inside.writestr("a/data.pkl", pickled)
    return made.getvalue()


def nested(calls):
    """Archives inside of one another, each named so many times."""
    made = archive(b"\x80\x02N.")
    for _ in range(3):
        head = b"\x80\x02B" + len(made).to_bytes(4, "little") + made
        made = archive(head + b"\x85q\x00ctorch.storage\n_load_from_bytes\nq\x01" + b"h\x01h\x00R0" * calls + b"N.")
    return made


KEY = b"\x80\x02(" + b"N" * 3000 + b"tq\x00(" + b"h\x00" * 3000 + b"tq\x01}" + b"h\x01Ns" * 200 + b"."
SIZES = b"\x80\x02(](" + b"N" * 4000 + b"etq\x00ctorch\nSize\nq\x01" + b"h\x01h\x00R" * 4000 + b"0" * 4000 + b"0."


@pytest.mark.parametrize(
    ("pickled_thing", "message"),
    [
        pytest.param(lambda: safe_unpickler.read(KEY, safe_unpickler.any_call, budget=safe_unpickler.Budget(500_000)), "more than 500000 opcodes", id="a key of many shared parts"),
        pytest.param(lambda: safe_unpickler.read(SIZES, plain_call()), "torch.Size", id="sizes of thousands of sides"),
        pytest.param(lambda: load(streams.BytesIO(nested(40)), 0, len(nested(40))), "more than 50000000 opcodes", id="archives named again and again"),
    ],
)  # fmt: skip
def test_opcodes_that_cost_more_than_one_are_paid_for(pickled_thing, message):
    started = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        pickled_thing()
    assert time.process_time() - started < 60  # minutes without a budget


def test_such_a_table_ends_the_conversion_with_one_line(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / ".metadata").write_bytes(b"\x80\x02}" + TWICE + b"Ns.")
    with pytest.raises(CheckpointError, match=r"\.metadata.*tuples nested too deep"):
        reader._run(source, out, "foreign")


def test_an_extra_state_is_data(theirs, tmp_path):
    place = reader.converted(theirs[0], tmp_path)
    index = json.loads((place / "index.json").read_text())
    number, at, size = index["objects"]["layer._extra_state/shard_0_1"]
    found = decoded(json.loads((place / index["files"][number]).read_bytes()[at : at + size]))
    assert found["recipe"] == {"class": "DelayedScaling", "fields": {"margin": 0, "amax_history_len": 16}}
    assert torch.equal(found["scale_fwd"], torch.arange(3.0))
    assert torch.equal(found["amax_history_fwd"], torch.arange(6.0).view(2, 3).t())
    assert encoded(found)["map"]


@pytest.mark.parametrize("name", ["os", "Recipe", None, ["DelayedScaling"]])
def test_an_extra_state_under_a_strange_recipe_is_refused(name):
    with pytest.raises(CheckpointError, match="expected one of"):
        extra_state.as_module({"recipe": {"class": name}}, None)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (None, "without extra_fp8_variables"),
        ({"num_gemms": 10**9}, "1000000000 GEMMs, expected 1 to"),
        ({"num_gemms": -1}, "-1 GEMMs"),
        ({"num_gemms": True}, "num_gemms is 'True'"),
        ({"fp8_max_fwd": "448"}, "fp8_max_fwd is '448'"),
        ({"fp8_checkpoint": 1}, "fp8_checkpoint is '1'"),
    ],
)
def test_an_extra_state_with_strange_variables_is_refused(variables, said):
    with pytest.raises(CheckpointError, match=said):
        extra_state._variables({"extra_fp8_variables": variables})


CONFINED = """
import os, sys
sys.path.insert(0, sys.argv[3])
from mpbridge.training.checkpoint.converter_process import confine
held = confine(sys.argv[1], sys.argv[2])
def tried(act):
    try: act(); return "done"
    except OSError as error: return type(error).__name__
print(held, tried(lambda: open(sys.argv[1] + "/in").read()), tried(lambda: open(sys.argv[2] + "/new", "w")),
      tried(lambda: open(sys.argv[1] + "/new", "w")), tried(lambda: open(sys.argv[2] + "/../secret").read()), dict(os.environ))
"""


def has_landlock():
    """Whether the kernel names a version of Landlock: the system call with LANDLOCK_CREATE_RULESET_VERSION."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_the_process_reads_the_checkpoint_and_writes_one_folder(tmp_path):
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from" / "in").write_text("x")
    (tmp_path / "secret").write_text("secret")
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-I", "-c", CONFINED, str(tmp_path / "from"), str(tmp_path / "to"), root]
    said = subprocess.run(command, env={}, capture_output=True, text=True, check=True, timeout=60).stdout.split(" ", 5)
    assert said[:5] == ["True", "done", "done", "PermissionError", "PermissionError"]
    assert "LC_CTYPE" in said[5] or said[5].strip() == "{}"  # (Python sets that one itself)


def test_it_loads_no_framework():
    assert loaded_by("import mpbridge.training.checkpoint.converter_process") == []
