"""What a notebook shows: every object as a table, values escaped, nothing loaded for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpbridge.common.report import progress
from mpbridge.common.report.console import console
from mpbridge.observe.audit.findings import Finding, Report
from mpbridge.precision import registry
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.plan import Receipt, plan
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.rehearse.report import Rehearsal, Rehearsed

ROOT = Path(__file__).resolve().parents[2]
CONFIG = MixedPrecisionConfig(bf16=True)
FINDING = Finding(subject="exp_avg", promised="fp32", found="bf16", ok=False, offenders=("a.weight",))
SHOWN = {
    "container": (lambda: ConfigContainer(mixed_precision="bf16_mixed", data={"corpus": "<b>.txt"}), ("corpus", "&lt;b&gt;")),
    "section": (lambda: ConfigContainer(train={"train_iters": 7}).train, ("train_iters", "7")),
    "config": (lambda: CONFIG, ("MixedPrecisionConfig", "bf16")),
    "policy": (lambda: resolve(CONFIG), ("reduce", "fp32")),
    "recipe": (lambda: registry.recipes["bf16_mixed"], ("recipe bf16_mixed", "validated")),
    "plan": (lambda: plan(resolve(CONFIG), model={"params_dtype": "fp16"}), ("model.params_dtype", "color:#8a5a00")),
    "receipt": (lambda: Receipt(fields={("model", "bf16"): (False, True)}), ("model.bf16", "true")),
    "audit": (lambda: Report(stage="live", findings=(FINDING,)), ("exp_avg", "color:#b3261e", "a.weight")),
    "rehearsal": (lambda: Rehearsal(title="t", made={}, recipes=[Rehearsed(recipe="r", failure="because")]), ("failed", "because")),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), SHOWN.values(), ids=SHOWN)
def test_an_object_is_a_table(make: Any, words: tuple[str, ...]) -> None:
    text = make()._repr_html_()
    assert text.count("<table>") == text.count("</table>") == 1
    assert all(word in text for word in words), text
    assert "<b>.txt" not in text


def test_keys_of_a_section_are_completed() -> None:
    keys = ConfigContainer().optimizer._ipython_key_completions_()
    assert {"lr", "weight_decay", "adam_beta2"} <= set(keys)


@pytest.mark.filterwarnings("ignore")
def test_ipython_completes_settings_as_attributes_and_as_keys() -> None:
    pytest.importorskip("IPython", reason="needs the extra notebook")
    from IPython.core.completer import IPCompleter, provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    config = ConfigContainer()
    completer = IPCompleter(InteractiveShell(), namespace={"config": config, "section": config.optimizer})

    def offered(text: str) -> set[str]:
        with provisionalcompleter():
            return {one.text.strip(".'\"") for one in completer.completions(text, len(text))}

    assert {"optimizer", "train"} <= offered("config.")
    assert {"lr", "loss_scale"} <= offered("config.optimizer.l")
    assert {"lr", "loss_scale"} <= offered("section['l")
    assert "weight_decay" not in offered("section['l")


def test_a_notebook_gets_a_bar_that_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, str]] = []
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(
        progress, "_CellBar", lambda total: SimpleNamespace(draw=lambda done, text: drawn.append((done, text)))
    )
    line = progress.ProgressLine(console(), total=3, interval=100)
    for step in (1, 2, 3):
        assert line.due(step)
        line.step(step, f"loss {step}")
    assert drawn[-1] == (3, "loss 3")


@pytest.mark.filterwarnings("ignore")
def test_the_example_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
    pytest.importorskip("ipykernel", reason="needs the extra notebook")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(ROOT / "docs" / "first_run.ipynb", as_version=4)
    nbclient.NotebookClient(
        book, timeout=840, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = ["".join(out.get("data", {}).get("text/html", "") for out in cell.outputs) for cell in code]
    assert "recipe bf16_with_fp8_delayed_scaling_mixed" in shown[0]
    assert "global_batch_size" in shown[1]
    assert any("<progress" in text for text in shown), "training draws its bar in the cell"
    assert "nothing is out of line" in shown[-1]
