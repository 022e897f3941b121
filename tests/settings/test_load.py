"""Layers: what is stronger, what it revokes, and where each value came from."""

from __future__ import annotations

import pytest

from mpbridge.common.errors import BadValue, Contradiction, UnknownName
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import register, unregister
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.load import COMMAND_LINE, dotted, read
from mpbridge.settings.other_recipe import carried, with_recipe


@pytest.fixture
def file(file):
    return lambda text: file("run.yaml", text)


def loaded(path, *overrides):
    return ConfigContainer.load(path, overrides)


def test_the_command_line_is_stronger_than_the_file_and_both_are_remembered(file):
    path = file("mixed_precision: bf16_mixed\noptimizer: {lr: 1e-3, weight_decay: 0.1}\n")
    c = loaded(path, "optimizer.lr=3e-4", "ddp.bucket_size=10")
    assert c.optimizer == {"lr": 3e-4, "weight_decay": 0.1}
    assert c.ddp == {"bucket_size": 10}
    assert c.origin["optimizer.lr"] == COMMAND_LINE
    assert c.origin["optimizer.weight_decay"] == str(path)


ADDED = "{recipe: bf16_mixed, grad_reduce_in_fp32: false}"
FROZEN_STAGES = "[{recipe: fp8_cs, until: 90%, frozen: ['*'], lora_dtype: fp32}, {recipe: bf16_mixed, frozen: ['*'], lora_dtype: fp32}]"
UNLIKE_STAGES = "[{recipe: fp8_cs, until: 90%, frozen: ['*']}, {recipe: bf16_mixed, lora_dtype: fp32}]"
LAYERS = [
    # (mixed_precision of the file, overrides, mixed_precision of both)
    ("bf16_mixed", ["mixed_precision.grad_reduce_in_fp32=false"], {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}),
    # another recipe drops what the weaker layer added to its own, and trains the same parameters
    *((ADDED, [f"mixed_precision={name}"], {"recipe": name.strip("'")}) for name in ("fp16_mixed", "'16'", "16")),
    *((ADDED.replace("}", ", frozen: ['*'], lora_dtype: fp32}"), [f"{name}=fp8_cs"], {"recipe": "fp8_cs", "frozen": ["*"], "lora_dtype": "fp32"})
      for name in ("mixed_precision", "mixed_precision.recipe")),
    # the same recipe in another spelling keeps the additions
    (ADDED, ["mixed_precision=BF16-mixed"], {"recipe": "BF16-mixed", "grad_reduce_in_fp32": False}),
    # as does an alias
    (ADDED.replace("bf16_mixed", "bf16_with_fp8_current_scaling_mixed"), ["mixed_precision=fp8_cs"], {"recipe": "fp8_cs", "grad_reduce_in_fp32": False}),
    # recipe and addition on one command line go together in any order
    *((ADDED, ["mixed_precision.fp8_margin=1", "mixed_precision=fp8_cs"][::order], {"recipe": "fp8_cs", "fp8_margin": 1}) for order in (1, -1)),
    # a later layer about one twin field overrules the other one
    ("{recipe: fp8_cs, fp8_param: true}", ["mixed_precision.fp8_param_gather=false"], {"recipe": "fp8_cs", "fp8_param_gather": False}),
    # a glob keeps its dots
    ("bf16_mixed", ["mixed_precision.modules.mlp.linear_fc2={fp8: hybrid}"], {"recipe": "bf16_mixed", "modules": {"mlp.linear_fc2": {"fp8": "hybrid"}}}),
    ("[{recipe: fp8_cs, until: 90%}, {recipe: bf16_mixed}]", ["mixed_precision=fp16_mixed"], {"recipe": "fp16_mixed"}),
    # what is frozen goes into a list and out of one
    ("{recipe: bf16_mixed, frozen: ['*']}", ["mixed_precision=[{recipe: fp8_cs, until: 50%}, {recipe: fp32, frozen: [x], until: 90%}, fp16_mixed]"],
     [{"recipe": "fp8_cs", "until": "50%", "frozen": ["*"]}, {"recipe": "fp32", "frozen": ["x"], "until": "90%"}, {"recipe": "fp16_mixed", "frozen": ["*"]}]),
    (FROZEN_STAGES, ["mixed_precision=fp16_mixed"], {"recipe": "fp16_mixed", "frozen": ["*"], "lora_dtype": "fp32"}),
    (FROZEN_STAGES, ["mixed_precision=[fp32]"], [{"recipe": "fp32", "frozen": ["*"], "lora_dtype": "fp32"}]),
    (UNLIKE_STAGES, ["mixed_precision={recipe: fp32, frozen: [y], lora_dtype: null}"], {"recipe": "fp32", "frozen": ["y"], "lora_dtype": None}),
]  # fmt: skip


@pytest.mark.parametrize(("below", "overrides", "both"), LAYERS)
def test_layers_of_a_recipe_and_its_additions(file, below, overrides, both):
    path = file(f"mixed_precision: {below}\n")
    c = loaded(path, *overrides)
    assert c.mixed_precision == both
    if isinstance(both, list):
        assert c.origin == {"mixed_precision": COMMAND_LINE}
        return
    assert {name.split(".")[1] for name in c.origin} == both.keys(), "what is dropped has no source"
    assert c.origin.get("mixed_precision.frozen") == {"y": COMMAND_LINE, "*": str(path)}.get(
        "".join(both.get("frozen", ()))
    )


def test_stages_that_freeze_differently_have_nothing_that_another_recipe_could_keep(file):
    with pytest.raises(Contradiction) as caught:
        loaded(file(f"mixed_precision: {UNLIKE_STAGES}\n"), "mixed_precision=fp32")
    frozen, adapters = caught.value.faults
    assert "frozen differs between the stages (['*']; none)" in frozen
    assert "lora_dtype differs between the stages (none; fp32)" in adapters
    assert "{recipe: NAME, frozen: VALUE}" in frozen


@pytest.mark.parametrize("wrong", ["frozen: {}", "frozen: {a: 1}", "lora_dtype: {a: 1}"])
def test_what_another_recipe_would_keep_but_cannot_be_read_is_reported(file, wrong):
    path = file(f"mixed_precision: {{{wrong}}}\n")
    for other in ("bf16_mixed", "[{recipe: bf16_mixed, until: 50%}, fp32]"):
        with pytest.raises(Contradiction, match=wrong.partition(":")[0]):
            loaded(path, f"mixed_precision={other}")


def test_a_stage_that_freezes_nothing_on_purpose_is_like_one_that_says_nothing(file):
    path = file("mixed_precision: [{recipe: fp8_cs, until: 90%, frozen: []}, bf16_mixed]\n")
    assert loaded(path, "mixed_precision=fp32").mixed_precision == {"recipe": "fp32", "frozen": []}
    path = file("mixed_precision: {recipe: fp8_cs, frozen: ['*']}\n")
    stages = "mixed_precision=[{recipe: fp8_cs, until: 90%, frozen: []}, {recipe: fp32, frozen: null}]"
    first, second = loaded(path, stages).mixed_precision
    assert (first["frozen"], second["frozen"]) == ([], None)


def test_what_a_recipe_freezes_stays_as_what_its_run_does(file, tmp_path):
    """A recipe file and a registered recipe are two more places to say it; another recipe's own word holds."""
    (tmp_path / "mine.yaml").write_text("extends: fp8_cs\nfrozen: ['*']\nlora_dtype: fp32\n")
    (tmp_path / "other.yaml").write_text("extends: fp8_cs\nfrozen: [x]\n")
    path = file("mixed_precision: mine.yaml\n")
    c = loaded(path, "mixed_precision=fp32")
    assert c.mixed_precision == {"recipe": "fp32", "frozen": ["*"], "lora_dtype": "fp32"}
    assert c.origin["mixed_precision.frozen"] == str(path)
    other = str(tmp_path / "other.yaml")
    assert loaded(path, f"mixed_precision={other}").mixed_precision == {"recipe": other, "lora_dtype": "fp32"}
    assert with_recipe("fp8_cs", "fp32") == "fp32"
    mine = tmp_path / "mine.yaml"
    for given in (mine, {"recipe": mine}, [{"recipe": mine, "until": 2}, mine]):
        assert with_recipe(given, "fp32") == {"recipe": "fp32", "frozen": ["*"], "lora_dtype": "fp32"}
    assert carried([mine, tmp_path / "other.yaml"], {"frozen": ["y"]}) == [mine, tmp_path / "other.yaml"]
    plain = tmp_path / "plain.yaml"
    plain.write_text("extends: fp8_cs\n")
    assert carried(plain, {"frozen": ["y"]}) == {"recipe": plain, "frozen": ["y"]}
    register(lambda: MixedPrecisionConfig(bf16=True, frozen=("x",)), name="freezes")
    try:
        assert with_recipe("freezes", "fp32") == {"recipe": "fp32", "frozen": ["x"]}
        assert with_recipe({"recipe": "freezes", "frozen": []}, "fp32") == {"recipe": "fp32", "frozen": []}
        assert with_recipe(MixedPrecisionConfig(bf16=True, frozen=("y",)), "freezes") == "freezes"
    finally:
        unregister("freezes")


def test_no_function_of_a_file_is_called_to_learn_what_it_freezes(file, tmp_path):
    (tmp_path / "mine.py").write_text("def fn():\n    raise SystemExit('called')\n")
    path = file("mixed_precision: {recipe: 'mine.py:fn', frozen: ['*']}\n")
    assert loaded(path, "mixed_precision=fp32").mixed_precision == {"recipe": "fp32", "frozen": ["*"]}


def test_additions_that_go_with_their_recipe_are_named(file):
    path = file(f"mixed_precision: {ADDED}\nmodel: {{num_layers: 4}}\n")
    (said,) = loaded(path, "mixed_precision=fp8_cs").dropped
    assert "grad_reduce_in_fp32=false dropped together with recipe bf16_mixed, which recipe fp8_cs" in said
    assert loaded(path, "mixed_precision=bf16").dropped == ()
    assert loaded(path, "mixed_precision={recipe: fp8_cs, grad_reduce_in_fp32: true}").dropped == ()


def test_a_recipe_file_is_the_same_under_another_path_to_it(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: fp16_mixed\n")
    (tmp_path / "other.yaml").write_text("extends: fp16_mixed\n")
    path = file("mixed_precision: {recipe: mine.yaml, grad_reduce_in_fp32: false}\n")
    same = loaded(path, "mixed_precision=./mine.yaml").mixed_precision
    assert same == {"recipe": "./mine.yaml", "grad_reduce_in_fp32": False}
    assert loaded(path, "mixed_precision=other.yaml").mixed_precision == {"recipe": "other.yaml"}
    path = file('mixed_precision: "a\\0.yaml"\n')  # no file can have this name
    assert loaded(path, "mixed_precision=bf16_mixed").mixed_precision == {"recipe": "bf16_mixed"}
    with pytest.raises(Contradiction, match="cannot be read"):
        loaded(path)


def test_a_glob_is_one_key_whatever_its_dots(file, tmp_path):
    """A list under "*" is no place for "*.mlp.linear_fc2", and the sources of a rule go with the rule alone."""
    (tmp_path / "below.yaml").write_text(
        """mixed_precision:
  recipe: bf16_mixed
  modules: {"*": {fp8: hybrid, fp8_recipe: tensorwise}, "*.mlp.linear_fc2": mxfp8}
"""
    )
    path = file("""extends: below.yaml
mixed_precision: {modules: {"*": [{layers: first 2, precision: bf16}, {layers: last 2, precision: bf16}], "*.mlp.linear_fc1": mxfp8}}
""")
    c = loaded(path, "mixed_precision.modules.*.mlp.linear_fc1=bf16")
    sources = {
        name.removeprefix("mixed_precision.modules."): origin for name, origin in c.origin.items() if "modules" in name
    }
    below = str(tmp_path / "below.yaml")
    assert sources == {"*": str(path), "*.mlp.linear_fc1": COMMAND_LINE, "*.mlp.linear_fc2": below}
    assert c.mixed_precision["modules"]["*.mlp.linear_fc1"] == "bf16"


def test_twin_fields_must_agree_within_one_command_line(file):
    twins = ("mixed_precision.fp8_param=true", "mixed_precision.fp8_param_gather=false")
    with pytest.raises(Contradiction, match="fp8_param=True and fp8_param_gather=False are the same setting"):
        loaded(file("mixed_precision: fp8_cs\n"), *twins)


def test_null_unsets(file):
    path = file("mixed_precision: bf16_mixed\ntrain: {threads: 2}\n")
    assert loaded(path, "train.threads=null").train == {"threads": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("optimizer.lr=", "no value"),
        ("optimizer.lr=[1", "not a YAML value"),
        ("train=3", "expected a mapping of settings"),
        ("trane.train_iters=3", "nearest: train"),
        ("mixed_precision.recipe.x=3", "expected a recipe's name"),
    ],
)
def test_what_no_override_can_be_is_named(file, text, said):
    with pytest.raises(Contradiction, match=said):
        loaded(file("mixed_precision: bf16_mixed\n"), text)


def test_a_value_and_settings_below_it_cannot_both_be():
    faults: list[str] = []
    dotted(["train.x=1", "train.x.y=2", "data.a.b=1", "data.a=1", "model=&m {a: *m}"], faults)
    assert len(faults) == 3
    assert "refers to itself" in faults[2]


def test_all_faults_of_file_and_command_line_come_together(file):
    path = file("mixed_precision: bf16_mxed\nmodel: {hiden_size: 3}\nnonsense: 1\n")
    with pytest.raises(Contradiction) as caught:
        loaded(path, "optimizer.lr=fast", "oops")
    assert len(caught.value.faults) == 5
    assert str(caught.value).startswith(f"the configuration {path} cannot be used")


LAUGHS = "a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)
NO_FILES = {
    **dict.fromkeys(("[1, 2]", "a: [", "a: 1\na: 2\n", "\x00", "just text", "!!python/object/apply:os.system [echo]"), r"run\.yaml"),
    **dict.fromkeys(("model: &m {a: *m}\n", LAUGHS, "[" * 50 + "]" * 50), "refers to itself, or exceeds"),
    f"model: [{'1,' * 49_000}]": "more than 20,000 keys and values",  # before all are read
}  # fmt: skip


@pytest.mark.parametrize(("text", "said"), NO_FILES.items(), ids=range(len(NO_FILES)))
def test_a_file_that_is_no_configuration_is_one_clear_error(file, tmp_path, text, said):
    with pytest.raises(BadValue, match=said):
        loaded(file(text))
    with pytest.raises(BadValue, match=r"nowhere\.yaml"):
        loaded(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_an_empty_configuration(file):
    assert read(file("")).tree == {}
    with pytest.raises(Contradiction, match="mixed_precision is missing"):
        loaded(file(""))


def test_a_recipe_file_is_found_beside_the_configuration(file, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: bf16_mixed\ngrad_reduce_in_fp32: false\n", encoding="utf-8")
    c = loaded(file("mixed_precision: mine.yaml\n"))
    assert c.faults() == []
    assert c.mixed_precision == {"recipe": str(tmp_path / "mine.yaml")}


def test_single_fields_cannot_change_a_list_of_stages(file):
    path = file("mixed_precision: [{recipe: fp8_cs, until: 90%}, {recipe: bf16_mixed}]\n")
    with pytest.raises(Contradiction, match="list of stages"):
        loaded(path, "mixed_precision.fp8_margin=1")


def test_code_that_a_strangers_configuration_names_is_not_run(tmp_path, file):
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef f(): pass\n", encoding="utf-8")
    path = file(f"mixed_precision: {tmp_path / 'evil.py'}:f\n")
    with pytest.raises(Contradiction, match="is code that comes with this configuration"):
        ConfigContainer.load(path)
    assert not marker.exists()
    with pytest.raises(Contradiction, match="returned NoneType"):
        ConfigContainer.load(path, trusted=True)
    assert marker.exists()


def test_a_configuration_extends_another_by_path_or_name(file, tmp_path):
    path = file("extends: below.yaml\noptimizer: {lr: 1e-4}\n")
    (tmp_path / "below.yaml").write_text("extends: llama3_8b\nmixed_precision: fp16_mixed\noptimizer: {weight_decay: 0.3}\n")  # fmt: skip
    c = loaded(path, "optimizer.lr=2e-4")
    assert (c.optimizer["lr"], c.optimizer["weight_decay"], c.model["num_layers"]) == (2e-4, 0.3, 32)
    assert c.mixed_precision == {"recipe": "fp16_mixed"}
    assert c.origin["optimizer.weight_decay"] == str(tmp_path / "below.yaml")
    assert "llama3_8b" in c.origin["model.num_layers"]
    assert c.resolved(2).recipe == "fp16_mixed"


WRONG_BASES = {
    "run.yaml": "extends itself through", "other.yaml": "extends itself through", "nope.yaml": "no configuration named 'nope.yaml'",
    "llama3_9b": "nearest: llama3_8b", "[llama3_8b]": "expected a file, or the name", "hf:there": "expected a file, or the name",
}  # fmt: skip


@pytest.mark.parametrize(("base", "words"), WRONG_BASES.items())
def test_what_cannot_be_extended_is_a_message(file, tmp_path, base, words):
    (tmp_path / "other.yaml").write_text("extends: run.yaml")
    with pytest.raises((BadValue, UnknownName), match=words):
        read(file(f"extends: {base}"))
