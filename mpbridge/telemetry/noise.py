"""How much of a weight's gradient is quantization noise: a sample of it from the tensors, and from what the GEMM read of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

SAMPLE = 64
"""Input and output features that are looked at: a corner of 64 x 64 gradients, spread over the weight."""


def spread(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to `wanted` positions, evenly over `count`."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


@dataclass(slots=True)
class Noise:
    """Sampled features of x and dy, as they are and as quantized: [tokens, features]. Multiplied once the step is over, where nobody watches."""

    exact: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    rounded: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def note(self, linear: str, side: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """exact, rounded: [tokens, features] of one operand of wgrad; the first ones of a step count, copies for wgrad before shared ones."""
        picked = spread(exact.shape[1], SAMPLE, exact.device)
        self.exact[linear, side] = exact[:, picked].float()
        self.rounded[linear, side] = rounded[:, picked].float()

    def ratios(self) -> dict[str, float]:
        """linear -> |g| / |g' - g|; a linear without noise is left out."""
        found = {}
        for linear in {name for name, _ in self.exact}:
            pairs = [(table.get((linear, "dy")), table.get((linear, "x"))) for table in (self.exact, self.rounded)]
            if any(one is None for pair in pairs for one in pair):
                continue
            exact, rounded = (_gradient(*pair) for pair in pairs)
            noise = float((rounded - exact).norm())
            if noise > 0:
                found[linear] = float(exact.norm()) / noise
        self.exact.clear()
        self.rounded.clear()
        return found


def _gradient(dy: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    assert dy is not None
    assert x is not None
    count = min(dy.shape[0], x.shape[0])  # an expert's padding
    with torch._C.DisableTorchFunction():
        return dy[:count].t() @ x[:count]
