"""Observes one step: every operation and its dtypes, attributed to modules; the gradients that autograd delivers, and the tokens of a summed loss. Results stay bit-identical."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mpbridge.backend.devices.collectives import world_size
from mpbridge.numerics.observation import modules
from mpbridge.numerics.observation.operations import OperationObserver
from mpbridge.numerics.observation.tensors import digest, factors, is_coarse, is_narrow, local, storage
from mpbridge.observe.audit.library import LibraryObservation
from mpbridge.observe.audit.passing import Arrivals
from mpbridge.observe.audit.products import Products
from mpbridge.precision.policy import Gemms


@contextmanager
def counted(chunks: list[Any], note: Callable[[int], None]) -> Iterator[None]:
    """Calls `note` with this rank's number while the block runs. megatron-core's schedules pass it to `finalize_model_grads_func` if the config sets
    calculate_per_token_loss; that function sums over ranks, so the number is read before it."""
    config = next((one.config for chunk in chunks for one in chunk.modules() if hasattr(one, "config")), None)
    real = getattr(config, "finalize_model_grads_func", None)
    if config is None or real is None or not getattr(config, "calculate_per_token_loss", False):
        yield
        return

    def finalize(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is not None:
            note(int(num_tokens))
        return real(model, num_tokens, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    try:
        yield
    finally:
        if config.finalize_model_grads_func is finalize:
            config.finalize_model_grads_func = real


_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
_BY_HAND = frozenset({"exp", "exp_", "exp2", "exp2_"})
"""Operations of an attention that are a softmax's, written out."""
_ROUTING = frozenset({"_softmax", "topk", "sigmoid"})
"""Operations of a router that read its logits, or scores computed from them."""
_FUSED_ATTENTION = "_scaled_dot_product"
_LOSS = frozenset({"exp", "exp_", "log", "_log_softmax", "logsumexp", "nll_loss_forward"})
_BEHIND = frozenset({"_log_softmax", "nll_loss_forward"})
"""Operations that identify a loss computed outside of every module; others there may be unrelated."""
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "rsqrt"})
_SCAN = frozenset({"exp", "cumsum", "softplus"})
"""Operations on the decays and step sizes of a Mamba layer's scan: in 16 bits their errors would accumulate over tokens."""
LOGITS = "logits"
"""Name of the output layer's result."""


def _autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _is_forward() -> bool:
    """Whether no node of the autograd graph is running."""
    return torch._C._current_autograd_node() is None


class Watch(OperationObserver):  # type: ignore[no-untyped-call]
    """Observes everything between `start` and `stop`; its records stay readable afterwards."""

    def __init__(
        self,
        gemms_of: Callable[[str], Gemms | None] = lambda path: None,
        *,
        seed: int = 0,
        odd: frozenset[torch.dtype] = frozenset(),
        behind: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        """odd: dtypes that no operation of a module's forward pass is to read; behind: those that none of the rest of the step is."""
        super().__init__()
        self._odd, self._behind = odd, behind
        self.odd: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        """(Module or other place, such a dtype) -> operations that read it there."""
        self.coarse: dict[str, None] = {}
        """Linears, routers and attentions that read activations of 3 or fewer mantissa bits."""
        self.lost: dict[str, None] = {}
        """Embeddings whose results have fewer bits than their weights."""
        self.outputs: dict[str, Counter[str]] = defaultdict(Counter)
        """Linear -> dtype of what it returned -> calls."""
        self.autocast: Counter[str] = Counter()
        self.attention: dict[str, Counter[str]] = defaultdict(Counter)
        """Core attention -> dtype of the factors of its products -> number of products."""
        self.passed: dict[str, Counter[str]] = defaultdict(Counter)
        """Core attention -> dtype of its inputs and outputs."""
        self.widened: set[str] = set()
        """Core attention computed by torch's unfused scaled_dot_product_attention, which uses FP32 regardless of its input dtype."""
        self.softmax: dict[str, Counter[str]] = defaultdict(Counter)
        """Module -> dtype that its softmax read -> number of calls."""
        self.fused: set[str] = set()
        """Modules whose softmax is inside an attention kernel, in FP32 regardless of its input dtype."""
        self.routing: dict[str, Counter[str]] = defaultdict(Counter)
        """Router -> dtype that its softmax, sigmoid and top-k read."""
        self.norms: dict[str, Counter[str]] = defaultdict(Counter)
        """Norm -> dtype that it computed on."""
        self.scans: dict[str, Counter[str]] = defaultdict(Counter)
        """Mamba mixer -> dtype that the decays and step sizes of its scan were computed on."""
        self.spelled: set[str] = set()
        """Norms written in Python, not a torch kernel: the dtype noted is that of the variance."""
        self.adapters: dict[str, list[tuple[float, float]]] = {}
        """Adapter -> `factors` of its product and of what it returned."""
        self._child: torch.Tensor | None = None
        """What the module that was left last returned."""
        self.ran: dict[str, Any] = {}
        """Linear, core attention, router or norm that returned something -> its module."""
        self.loss: Counter[str] = Counter()
        """dtype of the cross entropy's operations, of what its result is converted from, and of the loss at which backward starts."""
        self._has_loss = False
        """Whether the cross entropy of a micro-batch was computed and its backward pass has not begun."""
        self.angles: dict[str, str] = {}
        self.stream: dict[str, Counter[str]] = defaultdict(Counter)
        """Layer -> dtype of the residual stream after it."""
        self.rounded: Counter[str] = Counter()
        """Place -> number of FP32 activations there whose values all had 10 or fewer mantissa bits."""
        self.read: dict[str, int] = {}
        """Parameter -> digest of what the first forward pass of the step read; 0 on a single rank, where no other could have read anything else."""
        self.roots: list[float] = []
        """The scaled losses of the micro-batches, at which backward started."""
        self.tokens: list[int] = []
        """Number of tokens in this rank's summed loss; unset if the loss is a mean."""
        self.passes: Counter[str] = Counter()
        """Linear -> forward passes with tokens, recomputed ones too."""
        self.calls: Counter[str] = Counter()
        """Linear -> those of them through which a gradient comes back."""
        self.products = Products(gemms_of, seed)
        self.arrivals = Arrivals()
        self.library = LibraryObservation()
        self.check_read: Callable[[str, torch.Tensor], None] | None = None
        """Called once for every parameter that a forward pass reads: (name, tensor)."""
        self._stack: list[tuple[Any, str]] = []
        self._paths: dict[Any, str] = {}
        self._graph = modules.Graph()
        self._undo: ExitStack | None = None
        self.transformed = False
        """Whether modules ran under torch.func's transforms (vmap, grad): they are not observed."""
        self._inputs: deque[Any] = deque()
        self._names: dict[Any, tuple[str, str]] = {}

    # --- begin and end -------------------------------------------------------------------------------------------------------------------
    def start(self, chunks: list[Any]) -> None:
        """Starts observing these model chunks; a second start does nothing."""
        if self._undo is not None:
            return
        self._paths = modules.module_paths(chunks)
        self.products.modules = {path: module for module, path in self._paths.items() if modules.is_linear(module)}
        self.products.embeddings = {p: m for m, p in self._paths.items() if type(m).__name__.endswith("Embedding")}
        with ExitStack() as undo:
            undo.enter_context(modules.hooked(self._paths, self._enter, self._leave))
            undo.enter_context(counted(chunks, self.tokens.append))
            undo.enter_context(self)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Removes every hook and releases the graph."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None
        self._graph.forget()
        self._stack.clear()
        self._child = None
        self.products.forget()
        self.arrivals.forget()

    # --- modules -------------------------------------------------------------------------------------------------------------------------
    def _enter(self, module: Any, path: str, args: Any) -> None:
        if self._is_transformed():
            return
        self._stack.append((module, path))
        self._has_loss = False
        self._inputs.append(list(modules.tensors_in(args)))
        if modules.is_adapter(module):
            self.products.passing.adapts(path, modules.floating(args))
        source = modules.floating(args) if modules.is_linear(module) else None
        if source is not None:
            high = getattr(module, "unrounded", None)  # an emulated linear after a norm may quantize its FP32 result
            self.products.enters(path, source if high is None else high)
            if len(self._stack) > 1 and modules.is_adapter(self._stack[-2][0]) and path.endswith(".linear_in"):
                self.products.passing.follows(self._stack[-2][1], self._inputs[-2], source)
            self.library.enters(module, path, source)

    def _is_transformed(self) -> bool:
        """Whether a transform of torch.func is active, whose tensors have no values that could be read."""
        active = torch._C._functorch.peek_interpreter_stack() is not None
        self.transformed |= active
        return active

    def _leave(self, module: Any, path: str, args: Any, output: Any) -> None:
        if not self._stack or self._stack[-1][0] is not module or self._is_transformed():
            return
        self._stack.pop()
        inputs = self._inputs.pop()
        nodes = self._graph.add(path, inputs, modules.tensors_in(output))
        if modules.is_norm(module) or modules.is_linear(module):
            self._note_rounding(path, modules.floating(args))  # after the module's own hooks
        self._note_weights(module, path)
        if modules.is_scan(module) and hasattr(
            module, "conv1d"
        ):  # until 0.18, a module that itself never runs: the kernel reads its weight
            self._note_weights(module.conv1d, f"{path}.conv1d")
        child, self._child = self._child, modules.floating(output)
        result = self._child
        if result is None:
            return
        self._note_bits(module, path, args, result, child)
        if modules.is_router(module):
            self._note_rounding(path, result)  # probabilities
        computing = (modules.is_linear, modules.is_attention, modules.is_router, modules.is_norm)
        if result.numel() and any(kind(module) for kind in computing):
            self.ran[path] = module
        if modules.is_linear(module):
            self._note_linear(module, path, result, nodes)
            self.products.passing.leaves(path, module, modules.floating(args), result)
        elif modules.is_layer(module):
            self.stream[path][storage(result)] += 1
            self._note_rounding(path, result)
        elif modules.is_attention(module):
            for tensor in (result, modules.floating(inputs)):
                if tensor is not None:
                    self.passed[path][storage(tensor)] += 1
        elif modules.is_rotary(module):
            self.angles[path] = storage(result)
            self._note_rounding(path, result)

    def _note_bits(self, module: Any, path: str, args: Any, result: torch.Tensor, child: Any) -> None:
        if modules.is_adapter(module) and child is not None:
            self.adapters.setdefault(path, factors(child, result))
        if modules.is_linear(module) or modules.is_attention(module) or modules.is_router(module):
            if any(is_coarse(one) for one in modules.tensors_in(args) if one.is_floating_point()):
                self.coarse[path] = None
        elif path in self.products.embeddings and is_narrow(result):
            wide = any(is_narrow(local(p)) is False for p in module.parameters())
            self.lost |= {path: None} if wide else {}

    def _note_linear(self, module: Any, path: str, result: torch.Tensor, nodes: list[Any]) -> None:
        self.outputs[path][storage(result)] += 1
        self.autocast[_autocast(result.device.type)] += 1
        self._note_rounding(LOGITS if path.endswith("output_layer") else path, result)
        self.passes[path] += bool(result.numel())
        if result.numel() and result.requires_grad:
            self.calls[path] += 1
            self.products.attached(path, nodes)
        self.products.leaves(path, nodes)
        self.library.leaves(module, path)

    def _note_rounding(self, path: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and is_narrow(tensor):
            self.rounded[path] += 1

    def _note_weights(self, module: Any, path: str) -> None:
        """Records this module's own parameters while its forward pass is on the stack: fully sharded ones are gathered here."""
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}" if path else name
            if parameter is not None and not hasattr(parameter, "_local_tensor"):
                self.arrivals.ask(full, parameter)
                if full not in self.read:
                    self.read[full] = digest(parameter) if world_size() > 1 else 0
                    if self.check_read is not None:
                        self.check_read(full, parameter.detach())

    # --- operations ----------------------------------------------------------------------------------------------------------------------
    def computes(self, name: str, args: Any) -> None:
        """Notes the dtypes of softmax, routing, norms and the loss, and where backward starts."""
        read = getattr(args[0], "dtype", None) if args else None
        if read in (self._odd if self._stack else self._behind):
            owner = self._graph.owner()
            where = self._stack[-1][1] if self._stack else f"backward of {owner}" if owner else "outside of modules"
            self.odd[where, storage(args[0])][name] = None
        # with a capacity limit, a router also sorts integers
        if name in _ROUTING and self._stack and modules.is_router(self._stack[-1][0]) and args[0].is_floating_point():
            self._routed(args[0])
        by_hand = name in _BY_HAND and any(modules.is_attention(module) for module, _ in self._stack)
        if name in _SOFTMAX or name.startswith(_FUSED_ATTENTION) or by_hand:
            self._softmax(name, args[0])
        elif name in _NORMS:
            self._norm(name, args[0])
        elif name in _SCAN and self._stack and modules.is_scan(self._stack[-1][0]):
            self.scans[self._stack[-1][1]][storage(args[0])] += 1
        if name in _LOSS and self._of_the_loss(name) and args[0].is_floating_point():
            self.loss[storage(args[0])] += 1
            self._has_loss = True
        elif self._has_loss and name == "_to_copy" and self._is_of_the_loss(args[0]):
            self.loss[storage(args[0])] += 1
        # a backward pass starts at the gradient of a scalar, which no node creates
        single = name == "ones_like" and args[0].numel() == 1 and args[0].is_floating_point()
        if single and not self._stack and _is_forward():
            self.roots.append(float(args[0].detach()))
            if self._has_loss:
                self.loss[storage(args[0])] += 1
            self._has_loss = False

    def _softmax(self, name: str, read: torch.Tensor) -> None:
        module, path = self._here()
        if module is None or not path:
            return
        self.softmax[path][storage(read)] += 1
        if name == "_safe_softmax":
            self.widened.add(path)
        if name.startswith(_FUSED_ATTENTION):
            self.fused.add(path)
            self.attention[path][storage(read)] += 1

    def _norm(self, name: str, read: torch.Tensor) -> None:
        module, path = self._here()
        if module is not None and modules.is_norm(module):
            self.norms[path][storage(read)] += 1
            if name == "rsqrt":
                self.spelled.add(path)

    def _routed(self, read: torch.Tensor) -> None:
        path = self._stack[-1][1]
        if path not in self.routing:  # the first such operation reads the logits themselves
            self._note_rounding(path, read)
        self.routing[path][storage(read)] += 1

    def multiplies(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Attributes a GEMM to a module, or to the module whose backward pass is running."""
        module, path = self._here()
        if module is not None:  # forward, or recomputation during backward
            if modules.is_attention(module):
                # two dimensions are no product of heads: Transformer Engine builds its Hadamard matrix (FP32) where it first quantizes
                if left.dim() > 2:
                    self.attention[path][storage(left) if left.dtype is right.dtype else "mixed"] += 1
            elif left.dim() == 2:
                self.products.forward(path, left, right, out)
            elif modules.is_linear(module) or modules.is_router(module):
                self.products.batched(path, left, right)
            return
        owner = self._graph.owner()
        if owner is not None and left.dim() == 2:
            self.products.backward(owner, left, right, out)
        elif owner in self.products.modules:
            self.products.batched(owner, left, right)

    def _here(self) -> tuple[Any, str]:
        return self._stack[-1] if self._stack else (None, "")

    def _of_the_loss(self, name: str) -> bool:
        """Whether an operation belongs to the cross entropy: in the model's own forward pass, or after it if the loop computes the loss."""
        return self._at_root() if self._stack else name in _BEHIND and torch.is_grad_enabled()

    def _is_of_the_loss(self, read: torch.Tensor) -> bool:
        """Whether what is converted between the cross entropy and backward is its result: outside of submodules and of backward."""
        outside = not self._stack or self._at_root()
        return outside and read.is_floating_point() and _is_forward()

    def _at_root(self) -> bool:
        """Whether the operation belongs to the model itself, not to a submodule."""
        return self._stack[-1][1] == ""
