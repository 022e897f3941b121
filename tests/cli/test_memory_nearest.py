"""`mpbridge memory` names the nearest layout that fits, and does not look for one where the machine cannot run the recipe at all."""

from __future__ import annotations

import time

from mpbridge.cli.main import main


def test_no_layout_is_looked_for_on_a_machine_that_cannot_run_the_recipe(capsys) -> None:
    began = time.process_time()
    assert main(["memory", "--config", "qwen3_30b_a3b", "--recipe", "bf16_with_nvfp4_mixed", "--target", "a10", "--world-size", "64"]) == 1  # fmt: skip
    assert "no layout was searched: " in capsys.readouterr().out
    assert time.process_time() - began < 5, "thousands of layouts were judged"


def test_the_nearest_layout_is_named_where_the_machine_runs_the_recipe(capsys) -> None:
    assert main(["memory", "--config", "llama3_70b", "--recipe", "bf16_mixed", "--target", "a100", "--world-size", "64", "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1", "parallel.virtual_pipeline_model_parallel_size=null", "parallel.sequence_parallel=false"]) == 1  # fmt: skip
    assert "nearest layout that fits, on 64 GPUs: " in capsys.readouterr().out
