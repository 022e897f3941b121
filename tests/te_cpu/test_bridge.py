"""Megatron Bridge's own pretrain() on the CPU under recipes of ours, in processes of its own: against Bridge's own registry, and with faults planted."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.te_cpu.wheels import OLDEST, ROOT, ran, release_or_skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None,
    reason="Megatron Bridge is not installed (docs/stacks/megatron_bridge.md has the command)",
)
SIX = (
    ("bf16_mixed", "h100"),
    ("bf16_with_fp8_delayed_scaling_mixed", "h100"),
    ("bf16_with_fp8_current_scaling_mixed", "h100"),
    ("bf16_with_fp8_subchannel_scaling_mixed", "h100"),
    ("bf16_with_mxfp8_mixed", "b200"),
    ("bf16_with_nvfp4_mixed", "b200"),
)
RECIPE = SIX[2][0]
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def pretrain(
    recipe: str, machine: str, *options: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    on_cpu = ("-m", "mpbridge", "on-cpu", "--te", release_or_skip(OLDEST), "--target", machine)
    script = str(ROOT / "scripts/evidence/stacks/bridge_pretrain.py")
    return ran(*launcher, *on_cpu, script, recipe, *options, timeout=600)


def told(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_recipe_of_ours_trains_silently_and_as_bridges_own() -> None:
    ours = pretrain(RECIPE, "h100", "--steps", "3", "--evaluate", "3")  # steps and an evaluation
    theirs = told(pretrain(RECIPE, "h100", "--steps", "3", "--evaluate", "3", "--theirs"))
    assert told(ours) == theirs
    assert theirs["parameters"]["Float8Tensor bfloat16"] == 8
    assert "witness" not in ours.stdout + ours.stderr


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("recipe", "machine"), SIX, ids=[name for name, _ in SIX])
def test_twenty_steps_equal_those_of_bridges_own_registry_and_of_our_own_loop(
    recipe: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "seen.pt")
    words = ("--steps", "20")
    ours, theirs = (told(pretrain(recipe, machine, *words, *more)) for more in (["--record", file], ["--theirs"]))
    assert ours == theirs
    losses = [float(loss) for loss in ours["losses"].values()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0
    if "nvfp4" in recipe:  # each loop draws its own random numbers
        monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
        told(pretrain(recipe, machine, *words, "--record", file))
    own = told(pretrain(recipe, machine, *words, "--own", file, "--target", machine))
    assert own["other weights at the start"] == []
    assert own["equal to the bit"] == 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("mixed_precision", "compute: promised bf16, found fp16"),
        ("wire", "wire: gradients: promised fp32, found bf16"),
        ("quantization", "linears: promised high precision, found"),
        ("weight", "weights as read: promised main weights, rounded, found different (embedding.word_embeddings.weight)"),
        ("frozen", "weights moved: promised all that have gradients, found 0 of 27"),
    ],
)  # fmt: skip
def test_what_a_script_changes_behind_the_recipe_ends_the_run(plant: str, said: str) -> None:
    ends("step 1 deviates from bf16_mixed", said, "bf16_mixed", "--plant", plant)


def ends(step: str, words: str, recipe: str, *options: str) -> None:
    """Such a run ends with status 1, and says which step deviates and in what."""
    done = pretrain(recipe, "h100", *options)
    assert done.returncode == 1
    assert step in done.stdout + done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_evaluation_in_another_precision_ends_the_run() -> None:
    evaluated = ("--evaluate", "2", "--steps", "3")
    ends(f"step 2 deviates from {RECIPE}", "linears: promised", RECIPE, *evaluated, "--plant", "evaluation")
    # Megatron-LM#4560: a gather forced by an evaluation leaves the column copies of FP8 weights as they were
    ends(f"step 3 deviates from {RECIPE}", "(its column copy)", RECIPE, *evaluated)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_train_silently_and_begin_as_one() -> None:
    """The first four losses are printed with seven digits; later ones differ by the order of the gradients' sums."""
    one, two = (told(pretrain(RECIPE, "h100", launcher=how)) for how in ((), TWO))
    assert list(one["losses"].values())[:4] == list(two["losses"].values())[:4]
    assert one["parameters"] == two["parameters"]


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_two_processes_go_on_where_they_were(tmp_path: Path) -> None:
    """FP8 with weights stored in BF16: quantized ones are no safe globals of torch.load."""
    (tmp_path / "own.yaml").write_text(f"extends: {RECIPE}\nfp8_param_gather: false\n")
    place = str(tmp_path / "run")

    def losses(*options: str) -> dict[str, str]:
        return told(pretrain(str(tmp_path / "own.yaml"), "h100", "--steps", *options, launcher=TWO))["losses"]

    whole, first = losses("4"), losses("2", "--save", place)
    rest = losses("4", "--save", place, "--load", place)
    assert first | rest == whole
    assert list(rest) == ["3", "4"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_step_that_raises_leaves_nothing_of_the_callback() -> None:
    assert told(pretrain("bf16_mixed", "h100", "--plant", "raises")) == {"observing": False, "hooks": []}
