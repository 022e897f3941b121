"""Layers: what is stronger, what it revokes, and where each value came from."""

from __future__ import annotations

import pytest

from mpbridge.common.errors import BadValue, Contradiction, UnknownName
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.load import COMMAND_LINE, dotted, read


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def loaded(path, *overrides):
    return ConfigContainer.load(path, overrides)


def test_the_command_line_is_stronger_than_the_file_and_both_are_remembered(file):
    path = file("mixed_precision: bf16_mixed\noptimizer: {lr: 1e-3, weight_decay: 0.1}\n")
    c = loaded(path, "optimizer.lr=3e-4", "ddp.bucket_size=10")
    assert c.optimizer == {"lr": 3e-4, "weight_decay": 0.1}
    assert c.ddp == {"bucket_size": 10}
    assert c.origin["optimizer.lr"] == COMMAND_LINE
    assert c.origin["optimizer.weight_decay"] == str(path)


def test_an_override_adds_to_a_recipe_that_the_file_names(file):
    c = loaded(file("mixed_precision: bf16_mixed\n"), "mixed_precision.grad_reduce_in_fp32=false")
    assert c.mixed_precision == {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}


@pytest.mark.parametrize("name", ["fp16_mixed", "'16'", "16"])
def test_another_recipe_drops_what_the_weaker_layer_added_to_its_own(file, name):
    path = file("mixed_precision: {recipe: bf16_mixed, grad_reduce_in_fp32: false}\n")
    c = loaded(path, f"mixed_precision={name}")
    assert c.mixed_precision == {"recipe": name.strip("'")}
    assert "mixed_precision.grad_reduce_in_fp32" not in c.origin


def test_another_recipe_trains_the_same_parameters(file):
    path = file("mixed_precision: {recipe: bf16_mixed, grad_reduce_in_fp32: false, frozen: ['*'], lora_dtype: fp32}\n")
    for override in ("mixed_precision=fp8_cs", "mixed_precision.recipe=fp8_cs"):
        c = loaded(path, override)
        assert c.mixed_precision == {"recipe": "fp8_cs", "frozen": ["*"], "lora_dtype": "fp32"}
        assert c.origin["mixed_precision.frozen"] == str(path)


def test_the_same_recipe_in_another_spelling_keeps_the_additions(file):
    path = file("mixed_precision: {recipe: bf16_mixed, grad_reduce_in_fp32: false}\n")
    assert loaded(path, "mixed_precision=BF16-mixed").mixed_precision == {
        "recipe": "BF16-mixed",
        "grad_reduce_in_fp32": False,
    }


def test_recipe_and_addition_on_one_command_line_go_together_in_any_order(file):
    path = file("mixed_precision: {recipe: bf16_mixed, grad_reduce_in_fp32: false}\n")
    for order in (1, -1):
        c = loaded(path, *["mixed_precision.fp8_margin=1", "mixed_precision=fp8_cs"][::order])
        assert c.mixed_precision == {"recipe": "fp8_cs", "fp8_margin": 1}


def test_a_later_layer_about_one_twin_field_overrules_the_other_one(file):
    path = file("mixed_precision: {recipe: fp8_cs, fp8_param: true}\n")
    c = loaded(path, "mixed_precision.fp8_param_gather=false")
    assert c.mixed_precision == {"recipe": "fp8_cs", "fp8_param_gather": False}
    assert not c.resolved(training=False).policy.stored if c.model else True


def test_twin_fields_must_agree_within_one_command_line(file):
    with pytest.raises(Contradiction, match="fp8_param=True and fp8_param_gather=False are the same setting"):
        loaded(
            file("mixed_precision: fp8_cs\n"),
            "mixed_precision.fp8_param=true",
            "mixed_precision.fp8_param_gather=false",
        )


def test_a_modules_glob_keeps_its_dots(file):
    c = loaded(file("mixed_precision: bf16_mixed\n"), "mixed_precision.modules.mlp.linear_fc2={fp8: hybrid}")
    assert c.mixed_precision["modules"] == {"mlp.linear_fc2": {"fp8": "hybrid"}}


def test_null_unsets(file):
    assert loaded(file("mixed_precision: bf16_mixed\ntrain: {threads: 2}\n"), "train.threads=null").train == {
        "threads": None
    }


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
    dotted(["train.x=1", "train.x.y=2", "data.a.b=1", "data.a=1"], faults)
    assert len(faults) == 2


def test_all_faults_of_file_and_command_line_come_together(file):
    path = file("mixed_precision: bf16_mxed\nmodel: {hiden_size: 3}\nnonsense: 1\n")
    with pytest.raises(Contradiction) as caught:
        loaded(path, "optimizer.lr=fast", "oops")
    assert len(caught.value.faults) == 5
    assert str(caught.value).startswith(f"the configuration {path} cannot be used")


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "a: 1\na: 2\n", "\x00", "just text", "!!python/object/apply:os.system [echo]"]
)
def test_a_file_that_is_no_configuration_is_one_clear_error(file, text):
    with pytest.raises(BadValue, match=r"run\.yaml"):
        loaded(file(text))


LAUGHS = "a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    "text", ["model: &m {a: *m}\n", LAUGHS, "[" * 50 + "]" * 50], ids=["cycle", "billion laughs", "deep"]
)
def test_a_file_that_never_ends_is_refused_at_once(file, text):
    with pytest.raises(BadValue, match="refers to itself, or exceeds"):
        loaded(file(text))


def test_a_file_of_many_values_is_refused_before_all_are_read(file):
    with pytest.raises(BadValue, match="more than 20,000 keys and values"):
        loaded(file(f"model: [{'1,' * 49_000}]"))


def test_an_override_that_never_ends_is_refused():
    faults: list[str] = []
    dotted(["model=&m {a: *m}"], faults)
    assert "refers to itself" in faults[0]


def test_a_missing_file_is_named(tmp_path):
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
    assert loaded(path, "mixed_precision=fp16_mixed").mixed_precision == {"recipe": "fp16_mixed"}


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
    "itself": ("extends: run.yaml", "extends itself through"),
    "a circle": ("extends: other.yaml", "extends itself through"),
    "nothing there": ("extends: nope.yaml", "no configuration named 'nope.yaml'"),
    "no such name": ("extends: llama3_9b", "nearest: llama3_8b"),
    "no name": ("extends: [llama3_8b]", "expected a file, or the name"),
    "a folder of weights": ("extends: hf:there", "expected a file, or the name"),
}


@pytest.mark.parametrize(("text", "words"), WRONG_BASES.values(), ids=WRONG_BASES)
def test_what_cannot_be_extended_is_a_message(file, tmp_path, text, words):
    (tmp_path / "other.yaml").write_text("extends: run.yaml")
    with pytest.raises((BadValue, UnknownName), match=words):
        read(file(text))
