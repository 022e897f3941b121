"""The same facts for a Hugging Face model card: a paragraph and a table in Markdown."""

from __future__ import annotations

from mpbridge.common.shipped import VERSION
from mpbridge.common.tables.table import table
from mpbridge.training.disclosure.evidence import Evidence

ROWS = (
    "params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "linears", "quantized GEMMs", "compute", "attention", "softmax",
    "residual stream", "norms", "router", "rotary angles", "logits", "loss", "autocast", "loss scale",
)  # fmt: skip
"""Facts of the audit that a reader of a card asks for; rows of the wire follow."""


def model_card(evidence: Evidence) -> str:
    """Markdown: which recipe, on what, audited when, and what was found on live tensors."""
    data, parallel = evidence.data, evidence.data["parallel"]
    versions = ", ".join(f"{name.replace('_', '-')} {text}" for name, text in data["versions"].items() if text)
    how = "emulated in software" if evidence.emulated else "computed natively"
    recipes = list(dict.fromkeys(f"`{one['recipe']}`" for one in evidence.audits))
    steps = sorted({one["step"] for one in evidence.live})
    bad = [one["step"] for one in evidence.audits if not one["ok"]]
    found: dict[str, tuple[str, str, str, int]] = {}
    for one in evidence.live:
        for name, (promised, seen, state) in one["facts"].items():
            found[name] = (str(promised), str(seen), str(state), one["step"])
    verdict = f"deviations at step {', '.join(map(str, bad))}" if bad else "everything as the recipe promises"
    unseen = sorted(name for name, row in found.items() if row[2] == "not observed")
    text = (
        f"Trained with the recipe{'s' if len(recipes) > 1 else ''} {', then '.join(recipes)} (mpbridge {VERSION}; {versions}), engine {data['engine']}, {how}, on "
        f"{parallel['world_size']} process{'es' if parallel['world_size'] > 1 else ''}. "
        f"Live tensors were audited at {f'steps {_steps(steps)}' if steps else 'no step'}: {verdict}"
        + (f"; not observed: {', '.join(unseen)}." if unseen else ".")
    )
    shown = [name for name in (*ROWS, *sorted(n for n in found if n.startswith("wire: "))) if name in found]
    columns = ("what", "promised", "found on live tensors", "", "last seen at step")
    rows = ([" ".join(str(cell).split()) for cell in (name, *found[name])] for name in shown)
    return "\n".join(["## Numerical precision", "", text, "", table("", columns, rows).markdown()])


def _steps(steps: list[int]) -> str:
    named = [str(step) for step in steps]
    return ", ".join(named if len(named) <= 8 else [*named[:4], f"... ({len(named)} audits)", named[-1]])
