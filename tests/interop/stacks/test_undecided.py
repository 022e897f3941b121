"""Imports whose file leaves to something else what the precision is: undecided, never a default taken in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.cli.main import main
from mpbridge.interop.stacks.launch_script import read_script


@pytest.mark.parametrize(
    ("name", "text", "undecided"),
    [
        ("ds.json", {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}, ["bf16.enabled=auto: filled in by the launcher"]),
        ("both.json", {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, ["bf16.enabled=auto", "fp16.enabled=auto"]),
        ("args.json", {"output_dir": "o", "deepspeed": "zero3.json"}, ["deepspeed=zero3.json decides: pass that file"]),
        (
            "accelerate.json",
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": "z.json"}},
            ["z.json decides: pass that file"],
        ),
        (
            "lightning.json",
            {"trainer": {"strategy": {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"config": "z.json"}}}},
            ["config=z.json decides: pass that file"],
        ),
        ("said.json", {"bf16": {"enabled": True}, "train_batch_size": "auto", "gradient_clipping": "auto"}, []),
    ],
)  # fmt: skip
def test_what_decides_elsewhere_is_undecided(
    name: str, text: object, undecided: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(json.dumps(text))
    assert main(["import", str(tmp_path / name), "--json"]) == bool(undecided)
    lines = json.loads(capsys.readouterr().out)["undecided"]
    assert len(lines) == len(undecided)
    assert all(line.startswith(start) for line, start in zip(lines, undecided, strict=True))


def test_an_argument_of_a_script_counts_without_those_before_it() -> None:
    assert read_script('torchrun x.py "$@" --n $9', {"9": "--bf16"}).words == ["--bf16", "--n", "--bf16"]
    assert read_script('torchrun x.py "$@"', {"10": "c", "2": "b", "1": "a", "0": "s"}).words == ["a", "b", "c"]
