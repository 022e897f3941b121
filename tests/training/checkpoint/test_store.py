"""Checkpoint folders: whole or not there, damage named, the one before offered."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import parsed
from mpbridge.training.admission import beginning
from mpbridge.training.checkpoint import store


def make(folder, step, text="weights"):
    partial = store.begin(folder, step)
    (partial / "data.distcp").write_text(f"{text} {step}")
    (partial / "sub").mkdir()
    (partial / "sub" / "shard_0_1.pt").write_text("object")
    return store.seal(partial, step)


def test_a_sealed_checkpoint_is_found_and_whole(tmp_path):
    made = make(tmp_path, 7)
    assert made == tmp_path / "step_00000007" == store.locate(tmp_path) == store.locate(made)
    assert (tmp_path / store.LATEST).read_text() == "step_00000007\n"
    assert set(store.check(made)["files"]) == {"data.distcp", "sub/shard_0_1.pt"}


def test_what_is_not_sealed_is_not_a_checkpoint_and_goes_with_the_next_save(tmp_path):
    make(tmp_path, 1)
    left = store.begin(tmp_path, 2)
    (left / "data.distcp").write_text("half")
    assert [s.step for s in store.saved(tmp_path)] == [1]
    make(tmp_path, 3)
    assert not left.exists()
    assert [s.step for s in store.saved(tmp_path)] == [3, 1]


@pytest.mark.parametrize(
    "name", [".partial-step_00000001-aa", ".dropped-step_00000001-aa", ".switch-aa", ".converted-aa", ".latest-aa"]
)
def test_leavings_of_a_killed_run_go_with_the_next_save(tmp_path, name):
    (tmp_path / name).mkdir()
    make(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


def test_the_same_step_can_be_saved_again(tmp_path):
    make(tmp_path, 1, "old")
    assert (make(tmp_path, 1, "new") / "data.distcp").read_text() == "new 1"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "stay"),
    [
        pytest.param(None, None, [5, 4, 3, 2, 1], id="all"),
        pytest.param(2, None, [5, 4], id="last"),
        pytest.param(1, 2, [5, 4, 2], id="last and every"),
    ],
)
def test_old_ones_are_removed(tmp_path, keep_last, keep_every, stay):
    for step in range(1, 6):
        make(tmp_path, step)
    store.prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [s.step for s in store.saved(tmp_path)] == stay


def test_pruning_follows_no_link(tmp_path):
    outside = make(tmp_path / "elsewhere", 1)
    here = tmp_path / "here"
    make(here, 5)
    make(here, 6)
    (here / "step_00000001").symlink_to(outside, target_is_directory=True)
    store.prune(here, keep_last=1, keep_every=None)
    assert (outside / "data.distcp").exists()
    assert [s.step for s in store.saved(here)] == [6]


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(truncate, "data.distcp has 8 bytes, expected 9", id="truncated"),
        pytest.param(flip, "data.distcp differs from its checksum", id="bit flipped"),
        pytest.param(lambda file: file.unlink(), "data.distcp is missing", id="missing"),
        pytest.param(
            lambda file: (file.parent / store.MANIFEST).unlink(), "manifest.json is missing", id="no manifest"
        ),
        pytest.param(
            lambda file: (file.parent / store.MANIFEST).write_text("{"),
            "manifest.json cannot be read",
            id="broken manifest",
        ),
    ],
)
def test_damage_is_named_and_the_one_before_offered(tmp_path, damage, said):
    before, made = make(tmp_path, 1), make(tmp_path, 2)
    damage(made / "data.distcp")
    with pytest.raises(CheckpointError) as told:
        store.check(made)
    assert said in str(told.value)
    assert f"checkpoint.load={before}" in str(told.value)
    assert store.newest_whole(tmp_path).path == before


@pytest.mark.parametrize(
    ("exchanges", "renames", "stays"),
    [
        pytest.param(True, 0, "new", id="exchanged"),
        pytest.param(False, 0, "old", id="before"),
        pytest.param(False, 1, "old", id="between the renames"),
        pytest.param(False, 2, "new", id="before the old one is removed"),
        pytest.param(False, 3, "new", id="after"),
    ],
)
def test_the_same_step_saved_again_is_there_whenever_the_writer_is_killed(
    tmp_path, monkeypatch, exchanges, renames, stays
):
    """exchanges: whether the file system exchanges two names in one step. renames: done when the writer is killed."""
    make(tmp_path, 3, "old")
    one, other = (tmp_path / name for name in ("one", "other"))
    one.mkdir()
    other.mkdir()
    if exchanges and not store._exchanged(one, other):
        pytest.skip("the file system, or the operating system, exchanges no names")
    if not exchanges:
        monkeypatch.setattr(store, "_exchanged", lambda *_: False)
    partial = store.begin(tmp_path, 3)
    (partial / "data.distcp").write_text("new 3")
    done, rename = [], Path.rename

    def counted(path, target):
        if len(done) == renames:
            pytest.fail("killed")
        done.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted)
        patch.setattr(store, "discard", lambda path: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            store.seal(partial, 3)
    found = store.locate(tmp_path)  # before a run has claimed the folder, as `mpbridge check` does
    assert (found / "data.distcp").read_text() == f"{stays} 3"
    store.put_back(tmp_path)
    make(tmp_path, 2)  # which removes what killed writers leave
    place = store.locate(tmp_path)
    assert store.check(place)["step"] == 3
    assert (place / "data.distcp").read_text() == f"{stays} 3"
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "other", "step_00000002", "step_00000003"]


def test_a_claim_that_fails_removes_its_own_file_alone(tmp_path):
    folder = tmp_path / "run"

    def fails(act):
        with store.claim(folder):
            act()
            raise KeyError

    def begun_anew():
        shutil.rmtree(folder)
        make(folder, 1)
        (folder / store.WRITER).write_text("another run")

    with pytest.raises(KeyError):
        fails((folder / "losses").touch)
    assert os.listdir(folder) == ["losses"]
    with pytest.raises(KeyError):
        fails(begun_anew)
    assert sorted(os.listdir(folder)) == [store.WRITER, "latest", "step_00000001"]


def test_a_claim_whose_file_cannot_be_removed_still_tells_what_failed(tmp_path, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(KeyError), store.claim(tmp_path):
        raise KeyError


def test_a_link_named_like_a_replaced_checkpoint_is_left_alone(tmp_path):
    make(tmp_path, 1)
    (tmp_path / ".replaced-step_00000002-00000000").symlink_to(make(tmp_path / "other", 2))
    store.put_back(tmp_path)
    assert store.locate(tmp_path) == tmp_path / "step_00000001"


def test_damage_to_a_replaced_checkpoint_offers_the_one_before(tmp_path):
    make(tmp_path, 1)
    (make(tmp_path, 2) / "data.distcp").unlink()
    (tmp_path / "step_00000002").rename(tmp_path / ".replaced-step_00000002-00000000")
    with pytest.raises(CheckpointError, match=r"is missing\. The previous one is complete: .*step_00000001"):
        store.check(store.locate(tmp_path))


def test_a_claim_that_cannot_say_who_holds_it_holds_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store.socket, "gethostname", lambda: pytest.fail("interrupted"))
        with pytest.raises(pytest.fail.Exception) as kept, store.claim(tmp_path / "folder"):
            pass
    assert not os.listdir(tmp_path)
    with store.claim(tmp_path):
        pass
    assert kept.traceback


def test_damage_of_the_only_one_is_said_too(tmp_path):
    made = make(tmp_path, 2)
    truncate(made / "data.distcp")
    with pytest.raises(CheckpointError, match="no earlier complete checkpoint"):
        store.check(made)


def test_a_newest_one_that_is_a_link_is_named_and_not_passed_over(tmp_path):
    outside, here = make(tmp_path / "elsewhere", 5), tmp_path / "here"
    for step in (None, 3):
        if step is not None:
            make(here, step)
        here.mkdir(exist_ok=True)
        link = here / outside.name
        link.symlink_to(outside, target_is_directory=True)
        for section in ({"load": str(here)}, {"save": str(here), "load": str(here)}, {"save": str(here)}):
            cures = rf"\(checkpoint\.load={link}\), or remove the link"
            with pytest.raises(CheckpointError, match=rf"{link} is a symbolic link.* {cures}"):
                beginning(section)
        assert beginning({"save": str(here), "load": str(link)}) == (link, None)
        link.unlink()
    (here / "step_00000001").symlink_to(outside, target_is_directory=True)
    assert store.locate(here) == here / "step_00000003"


def test_of_many_that_cannot_be_read_each_is_read_a_few_times_at_most(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(store, "read_json", lambda file: read.append(file) or parsed(b"", str(file)))
    for step in range(1, 13):
        (tmp_path / store.name_of(step)).mkdir()
    with pytest.raises(CheckpointError, match="no earlier complete checkpoint"):
        store.read_manifest(store.locate(tmp_path))
    assert len(read) < 3 * 12


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a//b", "a/../b", "..\\x", ""])
def test_a_manifest_that_points_outside_is_refused(tmp_path, name):
    made = make(tmp_path, 1)
    manifest = json.loads((made / store.MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": "0"}
    (made / store.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside its folder"):
        store.check(made)


KILLED = """
import sys, pathlib, random, time
from mpbridge.training.checkpoint import store
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
for step in range(1, 10**6):
    partial = store.begin(folder, step)
    (partial / "data").write_bytes(bytes(200_000))
    store.seal(partial, step)
    store.prune(folder, keep_last=2, keep_every=None)
"""


def test_a_kill_at_any_moment_leaves_a_whole_newest(tmp_path):
    seen = 0
    for attempt in range(100):  # a slow machine needs longer for its first checkpoint
        if attempt >= 12 and seen >= 6:
            break
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.0137 * attempt)
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()
        newest = store.saved(tmp_path)
        if newest:
            seen += 1
            store.check(newest[0].path)
    assert seen >= 6
