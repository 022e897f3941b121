"""A file of somebody else's can neither run code, nor end in a traceback, nor make messages without end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.interop.stacks.importers import read_text
from mpbridge.interop.stacks.reading import KINDS
from mpbridge.precision.registry import get_mixed_precision_config

NAMES = [*zip("abcdefgh", "bcdefghi", strict=True)]
LAUGHS = "mixed_precision:\n  a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]" + "".join(
    f"\n  {name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in NAMES
)
MERGES = "mixed_precision:\n  a: &a {x: 1, y: 2}" + "".join(
    f"\n  {name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}" for before, name in NAMES
)


@pytest.mark.parametrize("name", ["{0}/evil.py:cfg", "{0}/evil.py", "evil:cfg"])
def test_compare_executes_no_python_file(name: str, file, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).write_text('x')\nfrom mpbridge import MixedPrecisionConfig\n"
    file("evil.py", f"{code}def cfg():\n    return MixedPrecisionConfig(bf16=True)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "executed" in cli("compare", "bf16_mixed", name.format(tmp_path), code=2)
    assert not ran.exists()


def test_compare_reads_a_stacks_python_file_as_text(file, cli, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).write_text('x')\nfrom megatron.bridge.training.config import ConfigContainer\n\n\n"
    path = file("pretrain.py", f"{code}def made():\n    return ConfigContainer(mixed_precision='bf16_mixed')\n")
    assert "stored parameters" in cli("compare", "bf16_mixed", f"{path}:made")
    assert not ran.exists()


@pytest.mark.parametrize("verb", [["compare", "bf16_mixed"], ["import"]])
@pytest.mark.parametrize("suffix", ["yaml", "json", "sh"])
def test_a_binary_file_is_one_clear_error(verb: list[str], suffix: str, tmp_path: Path, cli) -> None:
    path = tmp_path / f"bin.{suffix}"
    path.write_bytes(bytes(range(256)) * 8)
    said = cli(*verb, path, code=2)
    assert "a binary file" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "mixed_precision: &a\n  b: *a\n"])
def test_aliases_that_stand_for_billions_of_values_are_refused_before_they_are_made(text: str, file) -> None:
    assert len(text) < 1000
    with pytest.raises(DataError, match="once its aliases"):
        read_text(text, stack="megatron-bridge", name="run.yaml")
    with pytest.raises(Exception, match="once its aliases"):
        get_mixed_precision_config(str(file("recipe.yaml", text)))


def test_aliases_of_an_ordinary_file_are_read() -> None:
    text = "defaults: &d {bf16: true}\nmixed_precision: {<<: *d, grad_reduce_in_fp32: false}\n"
    assert read_text(text, stack="megatron-bridge", name="run.yaml").fields["grad_reduce_in_fp32"] is False


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        ("accelerate", f"mixed_precision: {LONG}"),
        ("automodel", f"model: {{torch_dtype: {LONG}}}\nstep_scheduler: {{}}"),
        ("lightning", f"trainer: {{precision: {LONG}}}"),
        ("megatron-bridge", f"mixed_precision: {LONG}"),
        ("megatron-bridge", f"mixed_precision: {{bf16: true, some_dtype: {LONG}}}\nddp: {{}}"),
        ("deepspeed", f"data_types: {{grad_accum_dtype: {LONG}}}"),
        ("deepspeed", f"fp16: {{enabled: true, hysteresis: {LONG}}}"),
        ("deepspeed", f"{LONG}: 1"),
        ("transformers", f"bf16: true\ntorch_dtype: {LONG}"),
        ("transformers", f"bf16: true\ndeepspeed: {LONG}"),
        ("torchtitan", f"training: {{mixed_precision_param: {LONG}}}"),
        ("megatron-lm", f"MODEL_ARGS: {{--hysteresis: {LONG}}}"),
        ("megatron-lm", f"MODEL_ARGS: {{--main-grads-dtype: {LONG}}}"),
        ("megatron-lm", f"MODEL_ARGS: {{--{LONG}: 1}}"),
    ],
)
def test_no_message_holds_the_whole_of_a_long_value(stack: str, text: str) -> None:
    try:
        found = read_text(text, stack=stack, name="f.yaml")
    except MpbridgeError as error:
        said = [str(error)]
    else:
        said = [line for kind in KINDS for line in getattr(found, kind)]
    assert said
    assert not [line[:80] for line in said if LONG in line]


def test_weight_gradients_in_high_precision_are_a_difference(file, cli) -> None:
    path = file("wg.yaml", "extends: bf16_with_fp8_delayed_scaling_mixed\nfp8_wgrad: false\n")
    assert "They compute differently" in cli("compare", "bf16_with_fp8_delayed_scaling_mixed", path)
    written = cli("export", path, "--to", "accelerate", code=(0, 1))
    assert "override_linear_precision=(False, False, True)" in written


@pytest.mark.parametrize(
    "body",
    [
        " x = y = [1]\n" + " x = [x, x]\n y = [y, y]\n" * 40 + " z = x == y\n",
        " x = [" + "1, " * 20_000 + "]\n for i in x:\n  for j in x: pass\n",
        " a = A()\n"
        + "".join(f" o{n} = A()\n" for n in range(12))
        + "".join(f" o{n}.a{way} = o{n + 1}\n" for n in range(11) for way in range(10))
        + " return ConfigContainer(mixed_precision='bf16_mixed', ddp=D(grad_reduce_in_fp32=o0))\n",
    ],
    ids=["compared", "loops", "objects"],
)
def test_python_text_whose_values_multiply_ends_at_once(body: str) -> None:
    text = f"import megatron.bridge\n\n\ndef f():\n{body} return ConfigContainer(mixed_precision='bf16_mixed')\n"
    started = time.process_time()
    found = read_text(text, name="f.py")
    assert found.fields["bf16"] is True
    assert time.process_time() - started < 20
    with pytest.raises(DataError, match="more than 100000 expressions"):
        read_text(text.replace("def f():\n", "def f():\n x = [" + "1, " * 100_000 + "]\n"), name="f.py")
