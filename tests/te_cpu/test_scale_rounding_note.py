"""The note on NVFP4's scale rounding: its program runs against Transformer Engine's own reference and prints what the note says."""

import re

from tests.te_cpu.wheels import NEWEST, ROOT, ran, release_or_skip

NOTE = ROOT / "docs" / "notes" / "nvfp4_scale_rounding.md"


def test_the_program_prints_what_the_note_says() -> None:
    release_or_skip(NEWEST)
    text = NOTE.read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    said = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0]
    assert len(program.splitlines()) <= 30
    done = ran("-c", program)
    assert done.returncode == 0, done.stderr
    found, wanted = ([float(n) for n in re.findall(r"[-+]?\d+\.\d+", one)] for one in (done.stdout, said))
    assert all(abs(a - b) <= 0.002 * max(1.0, abs(b)) for a, b in zip(found, wanted, strict=True)), done.stdout
