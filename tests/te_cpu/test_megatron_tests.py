"""The books of `scripts/evidence/megatron_tests.py`: which world a case's result is of, what counts, and what it names."""

import argparse
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpbridge.te_cpu.ranks import Merged, text_of
from scripts.evidence import megatron_tests as script


def filled(folder: Path, *rows: tuple[int, str, str, str]):
    store = script.Store(folder, "0123456789abcdef", "2.20")
    for ranks, test, outcome, text in rows:
        store.add("one/test_a.py", ranks, Merged(f"tests/unit_tests/one/test_a.py::{test}", outcome, text, 0.1, []))
    return store


WORLD = "[call, rank 0 of 1] RuntimeError: world_size (1) is not divisible by 8 (megatron/core/parallel_state.py:823)"


def test_a_case_has_the_result_of_its_largest_world(tmp_path: Path) -> None:
    store = filled(
        tmp_path, (1, "test_x", "failed", WORLD), (8, "test_x", "passed", ""), (1, "test_y", "failed", WORLD)
    )
    found = {name.split("::")[1]: script.standing(case) for name, case in store.cases().items()}
    assert found == {"test_x": "passed", "test_y": "ranks"}
    assert script.wanted(store, "one/test_a.py", 8, False, []) == ["tests/unit_tests/one/test_a.py::test_y"]
    assert script.wanted(store, "one/test_b.py", 8, False, []) is None


def test_a_larger_world_runs_what_wants_it_and_has_not_run_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = []

    class World(SimpleNamespace):
        unfinished = False

        def run(self, arguments: list[str], limit: float, done: list[str]) -> list[Merged]:
            left_out.append((self.count, arguments[-1], [name.split("::")[1] for name in done]))
            return []

    monkeypatch.setattr(script, "Ranks", lambda count, *_, **__: contextlib.nullcontext(World(count=count)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    store = filled(tmp_path, (1, "test_x", "passed", ""), (1, "test_y", "failed", WORLD), (1, "test_z", "passed", ""))
    options = {"checkout": tmp_path, "files": ["one/test_a.py"], "te": "2.20", "again": [], "minutes": 1, "show": 0}
    for sizes in ([1, 8], [8]):
        script.run(argparse.Namespace(**options, ranks=sizes, grace=1, each=1), store)
    page, every = "tests/unit_tests/one/test_a.py", ["test_x", "test_y", "test_z"]
    assert left_out == [(1, page, every), (8, page, ["test_x", "test_z"]), (8, page, [])]
    assert (store.whole(1), store.whole(8)) == ({"one/test_a.py"}, {"one/test_a.py"})


@pytest.mark.parametrize(
    ("text", "standing"),
    [
        (WORLD, "ranks"),
        ("[call, rank 0 of 1] AssertionError: Tensor-likes are not close! (a.py:1)\n    this test needs flash_attn", "failed"),
        ("[setup, rank 0 of 1] mpbridge.common.errors.Refused: torch.cuda.CUDAGraph runs on a GPU only: ... (a.py:1)", "excluded"),
        ("[call, rank 0 of 1] AttributeError: 'NoneType' object has no attribute 'shape' (a.py:1)\n def test_mamba():", "failed"),
        ("The world of 1 was ended in this test: it took longer than 60 s.\nrank 0: waits", "failed"),
        ("The world of 2 was ended in this test: rank 1 failed.\nrank 0: failed\nRuntimeError: Connection closed by peer\nrank 1: failed\nRuntimeError: SymmetricMemory", "excluded"),
        ("[call, rank 0 of 1] Failed: Timeout (>30.0s) from pytest-timeout. (/home/me/huggingface_hub/utils/_http.py:330)", "excluded"),
    ],
)  # fmt: skip
def test_only_the_error_itself_excludes_a_case_also_when_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, standing: str
) -> None:
    monkeypatch.setattr(script, "KEPT", tmp_path)
    store = filled(tmp_path / "store", (1, "test_x", "failed", text))
    store.keep()
    for one in (store, script.Store(tmp_path / "other", "0123456789abcdef", "2.20")):
        (case,) = one.cases().values()
        assert script.standing(case) == standing


def test_the_table_adds_up_and_a_lost_case_is_named(tmp_path: Path) -> None:
    rows = [
        (1, "test_a", "passed", ""),
        (1, "test_b", "failed", "[call, rank 0 of 1] ValueError: 12345 <module 'a' from '/home/me/a.py'> (x/y/z.py:9)"),
    ]
    rows += [(1, "test_c", "skipped", "Skipped: FLA"), (1, "test_d", "passed", ""), (1, "test_d", "failed", "E")]
    store = filled(tmp_path, *rows)
    lines = script.table(store, "0123456789abcdef", "2.20", 9)
    assert "| one | 4 | 1 | 2 | 0 | 0 | 1 | 33.3 % |" in lines
    assert "- failed, 1 cases (one/test_a.py): `ValueError: … <module 'a'…> (y/z.py)`" in lines
    assert [case.test.split("::")[1] for case in store.cases().values() if case.before == "passed"] == ["test_d"]


def test_a_reports_text_begins_with_its_error() -> None:
    crash = {"path": "/a/b.py", "lineno": 3, "message": "ValueError: no"}
    entry = {"data": {"lines": ["    f()", "E  ValueError: no"]}}
    report = {"longrepr": {"reprcrash": crash, "chain": [[{"reprentries": [entry]}, crash, None]]}}
    assert text_of(report).splitlines()[0] == "ValueError: no (/a/b.py:3)"
    assert text_of({"longrepr": ["a.py", 1, "Skipped: no"]}) == "Skipped: no"
