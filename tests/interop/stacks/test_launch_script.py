"""Launch scripts: the words that are read are those that bash itself hands to the program, and what only running would tell is said."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.interop.stacks.importers import read_args
from mpbridge.interop.stacks.launch_script import read_script

BASH = shutil.which("bash")
RECORDER = r"""
command_not_found_handle() { case "$1" in torchrun|python) printf '%s\0' "$@" > "$RECORD";; srun|nohup) shift; "$@";; esac; }
"""
FOLLOWED = {
    "arrays": "A=(--bf16\n  --fp8-format hybrid # why\n)\nA+=(--lr 1)\ntorchrun x.py ${A[@]} \"${A[@]}\"",
    "defaults": 'torchrun x.py ${A:---bf16} ${B:-} ${C:=7} $C "${D-e f}"\n',
    "defaults-set-first": ': "${A:=--bf16}" ${B=2}\ntorchrun x.py $A --n $B',
    "process-substitution": "while read -r a; do B=$a; done < <(echo x)\ntorchrun x.py --bf16",
    "arithmetic-condition": "if ((1 < 2)); then :; fi\ntorchrun x.py --bf16",
    "quotes": "torchrun x.py 'a $B' \"c \\\"d\\\" \\$E\" f\\ g a\"b c\"d",
    "exported": "export A=--bf16 B=2\ndeclare -a C=(--x y)\ntorchrun x.py $A --n $B ${C[@]}",
    "redirected": "torchrun x.py --a >log 2>&1 --b < /dev/null",
    "launchers": "nohup srun torchrun --nproc 8 x.py --bf16",
    "plain": 'A="--bf16 --lr 1"\ntorchrun x.py $A --x "a b"',
    "quoted-once": 'A=("--a b" "" --c)\ntorchrun x.py "${A[@]}"',
    "split-again": 'A=("--a b" --c)\ntorchrun x.py ${A[@]}',
    "string-of-commands": 'R="torchrun x.py --bf16 --lr 1"\nsrun bash -c "cd /tmp && $R"',
    "eval": 'A="--bf16"; eval torchrun x.py \\$A "--b"',
    "continued": "torchrun x.py \\\n  --a \\\n  --b 2>&1 | cat > /dev/null",
    "environment-of-one-command": "A=1\nA=2 torchrun x.py --a $A",
    "subshell": "A=1; (A=2; A+=3); { A+=4; }; torchrun x.py $A",
    "comments": "# --fp16\nA='--a#b' # --no\ntorchrun x.py $A # --never",
    "early-exit": "torchrun x.py --first\nexit 0\ntorchrun x.py --second --third",
}  # fmt: skip
"""Scripts whose words are those that bash hands over."""
SAID = {
    "arrays": "A=(--bf16\n  --fp8-format hybrid # why\n)\nA+=(--lr 1)\ntorchrun x.py ${A[@]} \"${A[@]}\" ${#A[@]} ${A[1]}",
    "case": 'S=13b\ncase $S in\n 7b|8b) A="--bf16";;\n 1*b) A="--fp16" ;;\n *) A="--none";;\nesac\ntorchrun x.py $A',
    "case-falls-through": "case a in a) A+=--x;& b) A+=y;; c) A+=z;; esac\ntorchrun x.py $A",
    "and-or": '[ 1 -eq 1 ] && A="--bf16" || A="--fp16"\n[ -n "$Z" ] && A+=" --z"\n[[ a == a* && ! b == c ]] && A+=" --y"\ntorchrun x.py $A',
    "elif": 'X=2\nif [ $X -gt 3 ]; then A=1; elif [[ $X -le 2 ]]\nthen A=2; else A=3; fi\ntorchrun x.py --n $A',
    "nested-if": "for i in 1 2; do if [ $i = 2 ]; then if true; then A+=\" --i$i\"; fi; fi; done\ntorchrun x.py $A",
    "defaults": 'torchrun x.py ${A:---bf16} ${B:-} ${C:=7} $C ${C:+--c} "${D-e f}" ${#C}',
    "cut": 'P=a/b/c.tar.gz\ntorchrun x.py ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/b/X} ${P//\\//-} ${P:2:3} ${P^^}',
    "functions": 'add() { A="$A --$1"; local n=$#; A="$A $n"; }\nfunction more { add two b; }\nadd one\nmore\nunused() { add three; }\ntorchrun x.py $A "$@"',
    "own-arguments": "set -- --a 'b c' d\nshift\ntorchrun x.py $# $1 \"$@\" \"$2\"",
    "options-loop": 'set -- --n 4 --fp8\nwhile [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2;; --fp8) F="--fp8-format hybrid"; shift;; *) shift;; esac; done\ntorchrun x.py --n $N $F',
    "arithmetic": "A=3; B=$((A * 2 + 7 / 2 - 1 % 3)); ((A += 4)); torchrun x.py $B $A $(( (A > 3) && 1 ))",
    "substitutions": 'D=$(dirname /a/b/c.sh); torchrun x.py $(echo --bf16 --lr 1) `basename /x/y.z .z` "$D" $(seq 1 3) $(printf %s q)',
    "here-document": 'read -r -d "" A <<EOF\n--bf16 --x $((1+1))\nEOF\nB=$(cat <<\'Q\'\n--no\nQ\n)\ntorchrun x.py $A',
    "here-document-run": "N=4\nbash <<EOF\ntorchrun x.py --n $N --bf16\nEOF",
    "quotes": "torchrun x.py 'a $B' \"c \\\"d\\\" \\$E\" f\\ g $'h\\ti' a\"b c\"d",
    "keyed-array": 'declare -A M=([s]=--small [l]=--large)\nM[x]=--extra\nK=l\ntorchrun x.py ${M[$K]} ${M[x]}',
    "indirect": 'NAME=OPTS; OPTS="--bf16 --x"; torchrun x.py ${!NAME}',
    "braces": "torchrun x.py --g{1..3} {a,b}c",
    "until-and-break": "i=0; until [ $i -ge 9 ]; do i=$((i+1)); [ $i = 2 ] && continue; A+=\" $i\"; if [ $i = 4 ]; then break; fi; done; torchrun x.py $A",
    "not": "if ! false; then A=--yes; fi; ! true || A+=--no; torchrun x.py $A",
    "semicolons": 'A="--x"; if [ "$A" = "--x" ]; then A="--y"; fi; torchrun x.py $A; echo done',
    "regex": '[[ gpt-13b =~ ^gpt-([0-9]+)b$ ]] && A=--sized; torchrun x.py $A',
    "exit-status": "false; A=$?; true; torchrun x.py --last $A $?",
}  # fmt: skip
"""Scripts of which something is not followed, which is said."""


def bash_words(script: str, tmp_path: Path) -> list[str]:
    file, record, recorder = tmp_path / "train.sh", tmp_path / "record", tmp_path / "recorder.sh"
    file.write_text(script)
    recorder.write_text(RECORDER)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "basename", "seq", "cat"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    assert BASH is not None
    environment = {"PATH": str(tools), "BASH_ENV": str(recorder), "RECORD": str(record)}
    subprocess.run([BASH, str(file)], env=environment, cwd=tmp_path, check=False, capture_output=True, timeout=60)
    theirs = record.read_text().split("\0")[:-1]
    return theirs[theirs.index("x.py") + 1 :]


@pytest.mark.skipif(BASH is None, reason="bash is not on this machine")
@pytest.mark.parametrize("name", FOLLOWED)
def test_words_are_what_bash_hands_over(name: str, tmp_path: Path) -> None:
    assert read_script(FOLLOWED[name], {}).words == bash_words(FOLLOWED[name], tmp_path)


@pytest.mark.skipif(BASH is None, reason="bash is not on this machine")
@pytest.mark.parametrize("name", SAID)
def test_a_word_that_bash_hands_over_and_that_is_not_read_is_said(name: str, tmp_path: Path) -> None:
    found, theirs = read_script(SAID[name], {}), bash_words(SAID[name], tmp_path)
    assert found.words != theirs, "followed after all: a row of FOLLOWED"
    assert any(re.search("not (decided|followed|read|run|expanded)", note) for note in found.notes), found.notes
    assert [word for word in found.words if word.startswith("--") and word not in theirs] == []  # nothing is made up


@pytest.mark.parametrize(
    ("script", "words", "note"),
    [
        ("N=$(nvidia-smi -L)\ntorchrun x.py --n $N --bf16", ["--bf16"], "--n: its value is known only when the script runs: not decided"),
        ("torchrun x.py `date +%s` --bf16 `date`", [], "--bf16: its value is known only when the script runs: not decided"),
        ("source conf.sh\ntorchrun x.py --bf16", ["--bf16"], "`source conf.sh` is not read"),
        ('torchrun x.py --bf16 "$@"', ["--bf16"], '"$@" has no values'),
        ("torchrun x.py --bf16 $A", ["--bf16"], "$A has no value: assumed empty"),
        ("if [ -n 1 ]; then\ntorchrun x.py --bf16", ["--bf16"], "`if` of line 1 is never closed"),
        ('torchrun x.py --bf16\nA="--x', ["--bf16"], "a quote opened in line 2 is never closed"),
        ("if x; then A=--bf16; else A=--fp16; fi\ntorchrun x.py $A", [], "line 1: A=--fp16 stands in `if` of line 1, which is not followed: not decided"),
        ("grep -q x y && A=--x\ntorchrun x.py $A", [], "A=--x depends on `grep`, which is not followed: not decided"),
        ("torchrun a.py --x\ntorchrun b.py --x --y", ["--x", "--y"], "2 commands start a program with options"),
        ("cat > job.sh <<EOF\npython y.py --fp16\nEOF\ntorchrun x.py --bf16", ["--bf16"], "line 1: a here-document is not read"),
        ("OPTIONS='--bf16 --lr 1'", ["--bf16", "--lr", "1"], "no command starts a Python program here"),
    ],
)  # fmt: skip
def test_what_only_running_would_tell_is_said(script: str, words: list[str], note: str) -> None:
    found = read_script(script, {})
    assert found.words == words
    assert any(note in line for line in found.notes), found.notes


def test_a_pattern_of_a_script_is_not_matched() -> None:
    started = time.process_time()
    found = read_script(f"X={'a' * 60}\n[[ $X =~ (a+)+b ]] && Y=--fp16\ntorchrun x.py --bf16 $Y", {})
    assert found.words == ["--bf16"]
    assert read_script("torchrun x.py {" + "," * 200_000, {}).words[0].startswith("{,")  # nor is one of ours quadratic
    assert time.process_time() - started < 10


@pytest.mark.parametrize("word", ["--ab{}", "bf{}"])
def test_unknown_words_without_number_are_named_in_little_time(word: str) -> None:
    started = time.process_time()
    found = read_args(" ".join(["--bf16", *map(word.format, range(20_000))]))
    assert len(found.unknown) == 20_000
    assert time.process_time() - started < 15


def test_an_outer_variable_is_the_environment_and_what_the_script_sets_wins() -> None:
    assert read_script("torchrun x.py --n ${N:-1}", {"N": "3"}).words == ["--n", "3"]
    assert read_script('torchrun x.py "$@" --n $9', {"9": "--bf16"}).words == ["--bf16", "--n", "--bf16"]
    assert read_script('torchrun x.py "$@"', {"10": "c", "2": "b", "1": "a", "0": "s"}).words == ["a", "b", "c"]
    found = read_script("N=1\ntorchrun x.py --n $N", {"N": "3", "M": "1"})
    assert found.words == ["--n", "1"]
    assert any("--env N=3 has no effect" in line for line in found.notes)
    assert any("--env M: the script does not use it" in line for line in found.notes)
    assert any("--env N: the script" in line for line in read_script("torchrun x.py --n $NN", {"N": "3"}).notes)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("A='eval $A;eval $A'\neval $A", "once they are expanded"),  # twice as many commands on each of 20 levels
        ("A=xxxxxxxxxx" + "\nA=$A$A" * 9 + "\necho " + "$A" * 20_000, "once they are expanded"),
        ("A=xxxxxxxxxx" + "\nA=$A$A" * 9 + "".join(f"\nB{n}=x$A" for n in range(9000)), "once they are expanded"),
        ("A+=(x)\n" * 50_000, "once they are expanded"),
        ("A=" + '"${A:-' * 2000 + "x" + '}"' * 2000, "nested too deeply"),
    ],
)
def test_a_script_whose_values_multiply_is_read_up_to_a_bound(script: str, said: str) -> None:
    started = time.process_time()
    assert any(said in line for line in read_script(f"{script}\n", {}).notes)
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    "script",
    ["A=xx\nfor i in {1..100}; do A=$A$A; done", "f() { f; }\nf", "(" * 500, "$(" * 500, "while true; do while true; do A+=x; done; done", "\0"],
)  # fmt: skip
def test_a_script_without_an_end_is_an_error_or_an_answer(script: str) -> None:
    with contextlib.suppress(BadValue):  # any other error is the failure
        assert isinstance(read_script(script, {}).words, list)


def test_nothing_of_a_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "X=$(touch a) `touch b`; touch c; eval 'touch d'; bash -c 'touch e'; : > f; if touch g; then :; fi; torchrun x.py $(touch h) --bf16"
    assert read_script(script, {}).words == ["--bf16"]
    assert list(tmp_path.iterdir()) == []


def test_arguments_take_variables_too() -> None:
    found = read_args("--bf16 $MORE --lr 1", env={"MORE": "--grad-reduce-in-bf16"})
    assert found.fields["grad_reduce_in_fp32"] is False
    assert any("$MORE has no value" in line for line in read_args("--bf16 $MORE").assumed)
    assert "--env MOER: the text of --args does not use it" in read_args("--bf16 $MORE", env={"MOER": "--fp16"}).assumed
    with pytest.raises(BadValue, match=r"never closed$"):  # not that it is read as if it were
        read_args("--bf16 'x")
    with pytest.raises(BadValue, match="one command"):
        read_args("--bf16; rm x")


def test_the_verb_takes_arguments_as_people_type_them(cli) -> None:
    assert "bf16_mixed" in cli("import", "--args", "--bf16")
    assert "fp16_mixed" in cli("import", "--env", "X=--fp16", "--args", "$X")
