"""What a GPU computes in one kernel, in few passes over memory on a CPU: causal attention, RMSNorm, SwiGLU and rotary embedding.

Each gives the results and gradients of the composite that torch (2.13) or megatron-core would compute there, to the bit: the same operations in the same precision
and order, without the copies, zeros and concatenations between them. Attention aside, the composite itself is left to compilers, to torch.jit.trace, to transformations
of functions (torch.func) and to forward-mode differentiation, which look into it, and to other kinds of tensors. Gradients have no derivatives, as those of a GPU's
kernels have none: `create_graph=True` is refused, but for the rotary embedding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

BLOCK = 128
"""Queries per block. Half of the scores of a causal matrix are never needed; blocks of 128 skip most of them and keep the products large."""

CHUNK = 1 << 17
"""FP32 numbers of a norm that are worked on at a time: three arrays of 0.5 MB stay in a core's second-level cache."""


def eager(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors, and nothing looks into what is computed with them."""
    looked_into = (
        torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    )
    looked_into = looked_into or torch._C._functorch.peek_interpreter_stack() is not None
    return not looked_into and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` that raises RuntimeError where it is itself to be differentiated: what it reads is cut off from the graph, so that the result would be silently wrong."""

    @functools.wraps(backward)
    def once(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # autograd enables it in a backward for create_graph=True alone
            raise RuntimeError(
                "attention, RMSNorm and SwiGLU have no second derivatives on a CPU: leave create_graph=True out"
            )
        return backward(ctx, *grads)

    return once


@torch.compiler.allow_in_graph  # a compiler that looked into it would fold the check of `first_order`
class BlockedAttention(torch.autograd.Function):
    """softmax(scale q kT + causal mask) v of [sequence, batch, heads, width] tensors, as [sequence, batch, heads x width].

    Matrix products over blocks of queries, each with the keys that it can attend to. Compared with torch's flash kernel on an AVX512-BF16 CPU (BF16, one thread,
    16 heads of 64), forward and backward take 8.5 ms instead of 14.2 at length 256, and 83 instead of 122 at 1024. The softmax is computed in FP32 and probabilities
    are stored in the input's dtype, as in megatron-core's own attention.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Keeps the probabilities of every block."""
        length, batch, heads = query.shape[:3]
        q, k, v = (_by_head(tensor) for tensor in (query, key, value))
        # a power of two scales the queries without rounding, and they are fewer than the scores; FP16 has too few exponents for that
        before = math.frexp(scale)[0] == 0.5 and q.dtype is not torch.float16
        q = q * scale if before else q
        mask = torch.full((BLOCK, BLOCK), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
        out = torch.empty(length, batch * heads, v.shape[-1], dtype=q.dtype, device=q.device)
        kept = []
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            scores = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2))
            if not before:
                scores.mul_(scale)
            # after the scale, which need not be positive: a negative one would turn minus infinity around, and zero would make it NaN
            scores[:, :, start:end] += mask[: end - start, : end - start]
            # torch's softmax of 16-bit scores computes in FP32 and rounds the result
            kept.append(torch.softmax(scores, -1))
            out[start:end] = torch.bmm(kept[-1], v[:, :end]).transpose(0, 1)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale, ctx.before, ctx.shape = scale, before, (length, batch, heads, -1)
        return out.view(length, batch, -1)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key and value; starts at the last block, which attends to all keys."""
        q, k, v, *kept = ctx.saved_tensors
        grad = _by_head(grads[0].view(ctx.shape))
        dq = torch.empty_like(q)
        dk: Any = None
        dv: Any = None
        for index in reversed(range(len(kept))):
            start, probabilities = index * BLOCK, kept[index]
            end = min(start + BLOCK, q.shape[1])
            block = grad[:, start:end]
            dv = _added(dv, torch.bmm(probabilities.transpose(1, 2), block))
            from_probabilities = torch.bmm(block, v[:, :end].transpose(1, 2))
            scores = torch._softmax_backward_data(from_probabilities, probabilities, -1, probabilities.dtype)
            if not ctx.before:
                scores.mul_(ctx.scale)
            dq[:, start:end] = torch.bmm(scores, k[:, :end])
            dk = _added(dk, torch.bmm(scores.transpose(1, 2), q[:, start:end]))
        if ctx.before:
            dq.mul_(ctx.scale)
        return *(tensor.transpose(0, 1).reshape(ctx.shape) for tensor in (dq, dk, dv)), None


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """[sequence, batch, heads, width] as [batch x heads, sequence, width]; contiguous, for every product would make its own copy."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1]).transpose(0, 1).contiguous()


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    if total is None:
        return part
    total[:, : part.shape[1]] += part
    return total


class RootMeanSquare(torch.autograd.Function):
    """x rsqrt(mean(x**2) + eps) weight over the last axis, in FP32 and rounded once, of x and weight of one 16-bit dtype on a CPU (see `takes`).

    In FP32 torch's composite adds the gradients of x and of what else reads x in another order, so it has that to itself.
    """

    @staticmethod
    def takes(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> bool:
        """Whether it computes what torch's composite does."""
        halves = x.dtype is weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"
        return halves and eps is not None and x.shape[-1:] == weight.shape and x.shape[-1] > 0 and eager(x, weight)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Keeps x and the factor of each row (FP32)."""
        rows, out, wide = (
            x.reshape(-1, x.shape[-1]),
            torch.empty(x.shape, dtype=x.dtype, device=x.device),
            weight.float(),
        )
        factors = wide.new_empty(len(rows), 1)
        written = out.view(rows.shape)
        for part, (values, squares) in _chunks(rows, wide, 2):
            values.copy_(rows[part])
            torch.mul(values, values, out=squares)
            torch.rsqrt(squares.mean(-1, keepdim=True).add_(eps), out=factors[part])
            written[part] = values.mul_(factors[part]).mul_(wide)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and weight; the weight's sum over rows is one, as torch's."""
        x, weight, factors = ctx.saved_tensors
        rows, wide = x.reshape(-1, x.shape[-1]), weight.float()
        grad, out = grads[0].reshape(rows.shape), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        written = out.view(rows.shape)
        by_weight = wide.new_empty(rows.shape) if ctx.needs_input_grad[1] else None
        for part, (one, values, product) in _chunks(rows, wide, 3):
            one.copy_(grad[part])
            values.copy_(rows[part])
            if by_weight is not None:
                torch.mul(values, factors[part], out=by_weight[part]).mul_(one)
            one.mul_(wide)
            # of the factor r = (mean(x**2) + eps)**-0.5: dr/dx = -r**3 x / width
            inner = torch.mul(one, values, out=product).sum(-1, keepdim=True)
            inner = (-0.5 * inner * factors[part].pow(3)).div_(rows.shape[1]).mul_(2.0)
            written[part] = one.mul_(factors[part]).add_(values.mul_(inner))
        total = None if by_weight is None else by_weight.view(x.shape).sum_to_size(weight.shape).to(weight.dtype)
        return out, total, None


def _chunks(rows: torch.Tensor, wide: torch.Tensor, arrays: int) -> Any:
    """(Rows of a chunk, that many uninitialised FP32 arrays of its shape), chunk after chunk over the same memory. wide: an FP32 tensor on the device."""
    # several threads share the sum of a row that is alone, from torch's GRAIN_SIZE on, and add in another order than one thread of several rows
    count = max(1, len(rows) if rows.shape[1] >= 1 << 15 else CHUNK // max(1, rows.shape[1]))
    scratch = wide.new_empty(arrays, min(count, len(rows)), rows.shape[1])
    for start in range(0, len(rows), count):
        end = min(start + count, len(rows))
        yield slice(start, end), scratch[:, : end - start]


class SwiGLU(torch.autograd.Function):
    """silu(gate) linear of [..., gate and linear] one after the other, as [..., half of the width]; silu is rounded to the dtype first, as F.silu does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keeps x and silu(gate)."""
        gate, linear = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * linear

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Both halves are written where they belong."""
        x, activated = ctx.saved_tensors
        (gate, linear), out = x.chunk(2, -1), torch.empty_like(x)
        by_gate, by_linear = out.chunk(2, -1)
        torch.mul(grads[0], activated, out=by_linear)
        torch.mul(grads[0], linear, out=by_gate)
        torch.ops.aten.silu_backward.grad_input(by_gate, gate, grad_input=by_gate)
        return out


def with_swiglu(forward: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's `MLP.forward`, with `SwiGLU` where that is what the config asks for: no clamp, offset, fusion, or scale per token."""

    @functools.wraps(forward)
    def multiply(self: Any, hidden_states: torch.Tensor, per_token_scale: Any = None, **others: Any) -> Any:
        config = self.config
        changed = (
            config.bias_activation_fusion or config.use_te_activation_func or config.glu_linear_offset
            or any(value is not None for value in (per_token_scale, config.activation_func_clamp_value, *others.values()))
        )  # fmt: skip
        if changed or not (config.gated_linear_unit and self.activation_func is config.activation_func is F.silu):
            return forward(self, hidden_states, per_token_scale, **others)
        wide, bias = self.linear_fc1(hidden_states)
        wide = wide if bias is None else wide + bias
        if eager(wide) and wide.shape[-1] % 2 == 0:
            return self.linear_fc2(SwiGLU.apply(wide))  # type: ignore[no-untyped-call]
        gate, linear = wide.chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * linear)

    return multiply


class Rotary(torch.autograd.Function):
    """t cos + (-second half, first half) sin of [sequence, ..., width], given cos, -sin of the first half and sin of the second."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, minus: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Keeps no activations."""
        ctx.turn = cos, minus, sin
        return _turned(t, cos, minus, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Turned back."""
        cos, minus, sin = ctx.turn
        return Rotary.apply(grads[0], cos, sin, minus), None, None, None  # type: ignore[no-untyped-call]


def _turned(t: torch.Tensor, cos: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    half = t.shape[-1] // 2
    # a dispatch mode may keep what an operation returned (selective checkpointing), and refuse that it is written into
    if torch._C._len_torch_dispatch_stack() > 0:
        return t * cos + torch.cat((t[..., half:] * first, t[..., :half] * second), -1)
    out, other = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for _ in range(2))
    torch.mul(t, cos, out=out)
    torch.mul(t[..., half:], first, out=other[..., :half])
    torch.mul(t[..., :half], second, out=other[..., half:])
    return out.add_(other)


_TURNS: Any = WeakIdKeyDictionary()
"""Tensor of angles -> {dtype: (its values then, (cos, -sin of the first half, sin of the second))}."""


def with_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's `_apply_rotary_pos_emb_bshd`, with `Rotary` where all of the width turns, half against half; cos and sin are computed once for each tensor
    of angles, which megatron-core keeps from step to step."""

    @functools.wraps(original)
    def apply(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not eager(t, freqs):
            return original(t, freqs, *args, **kwargs)
        plain = not args and all(value == 1.0 if name == "mscale" else not value for name, value in kwargs.items())
        fits = freqs.dim() == t.dim() and freqs.shape[-1] == t.shape[-1] and t.shape[-1] % 2 == 0
        fits = fits and all(angles in (1, size) for size, angles in zip(t.shape, freqs.shape, strict=True))
        if not plain or not fits or freqs.requires_grad or freqs.is_meta:
            return original(t, freqs, *args, **kwargs)
        # under a dispatch mode these may stand for tensors without values; nothing is kept there, but the same operation is saved and observed
        kept = None if torch._C._len_torch_dispatch_stack() > 0 else _TURNS.setdefault(freqs, {})
        values, turn = (kept or {}).get(t.dtype, (None, ()))
        # by value: a version says nothing of what is written through .data or NumPy
        if values is None or values.dtype is not freqs.dtype or not torch.equal(values, freqs):
            cos, sin, half = torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype), t.shape[-1] // 2
            turn = cos, -sin[..., :half], sin[..., half:].contiguous()
            if kept is not None:
                kept[t.dtype] = freqs.detach().clone(), turn
        return Rotary.apply(t, *turn)  # type: ignore[no-untyped-call]

    return apply
