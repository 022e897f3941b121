"""Live runs of stacks that shard with torch: torchtitan's and AutoModel's own parallelizing code, Lightning's FSDP strategy, DeepSpeed, FSDP2 under TP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from mpbridge.observe.witnessing.callbacks import lightning_callback
from mpbridge.observe.witnessing.report import Witnessed
from mpbridge.observe.witnessing.witness import witness
from scripts.evidence.witness_common import (
    BF16,
    VOCABULARY,
    Case,
    Net,
    adam,
    checkout,
    lightning_module,
    tokens,
    two_steps,
)


# --- torchtitan --------------------------------------------------------------------------------------------------------------------------------
class Decoder(torch.nn.Module):
    """A network whose modules have the names that torchtitan shards by."""

    enable_weight_tying = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = torch.nn.Embedding(VOCABULARY, 32)
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(32, 32) for number in range(2)})
        self.norm = torch.nn.RMSNorm(32)
        self.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(batch)
        for layer in self.layers.values():
            hidden = hidden + functional.gelu(layer(hidden))
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def torchtitan(dtype: str | None = None) -> Witnessed:
    """Its TrainingConfig and its apply_fsdp_to_decoder; dtype: training.dtype; None: its default."""
    sys.path.insert(0, str(checkout("torchtitan")))
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    given = {} if dtype is None else {"dtype": dtype}
    training = TrainingConfig(num_tokens_per_microbatch_per_dp_rank=32, max_context_length=8, **given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPE_MAP[training.dtype])  # as its trainer does around the model
    model = Decoder()
    torch.set_default_dtype(before)
    size = dist.get_world_size()
    apply_fsdp_to_decoder(
        model,
        dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    optimizer = adam(model)
    seen = witness(model, optimizer, at={2})
    for step in range(2):
        batch = tokens(step)
        with seen.step():
            losses = functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten(), reduction="sum")
            (losses / (batch.numel() * size)).backward()  # by the tokens of all ranks, as its trainer does
            optimizer.step()
            optimizer.zero_grad()
    return seen.report


# --- AutoModel ---------------------------------------------------------------------------------------------------------------------------------
def automodel(wrap: Callable[[Any], Any], optimizer_of: Callable[[Any], Any] = adam) -> Witnessed:
    """Transformers' Llama loaded in BF16, wrapped by one of its managers."""
    sys.path.insert(0, str(checkout("Automodel")))
    logging.disable(logging.WARNING)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = wrap(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes)).to(BF16))
    optimizer = optimizer_of(model)
    seen = witness(model, optimizer, at={2})
    for step in range(2):
        batch = tokens(step)
        with seen.step():
            logits = model(batch, use_cache=False).logits
            functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.report


def _by_fsdp2(model: Any) -> Any:
    """Its FSDP2Manager with its default policy."""
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
    from nemo_automodel.components.distributed.mesh import MeshContext

    config = FSDP2Config()
    return FSDP2Manager(config, device_mesh=MeshContext.build(config).device_mesh).parallelize(model)


def _by_ddp(model: Any) -> Any:
    from nemo_automodel.components.distributed.config import DDPConfig
    from nemo_automodel.components.distributed.ddp import DDPManager

    return DDPManager(DDPConfig()).parallelize(model)


def fused_adam() -> Witnessed:
    """Its FSDP2Manager with Transformer Engine's FusedAdam, over Transformer Engine's own Python on a played machine."""
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.te_cpu import transformer_engine_on_cpu

    checkout("Automodel")
    try:
        played = transformer_engine_on_cpu("h100")
        played.__enter__()
    except MpbridgeError as error:
        raise ImportError(str(error)) from error
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam

        how = {"lr": 1e-3, "master_weights": True, "store_param_remainders": True}
        return automodel(_by_fsdp2, lambda model: FusedAdam(list(model.parameters()), **how))
    finally:
        played.__exit__(None, None, None)


# --- Lightning ---------------------------------------------------------------------------------------------------------------------------------
def lightning_fsdp(precision: str) -> Witnessed:
    """Its FSDPStrategy and FSDPPrecision, which require a GPU only by the strategy's exact class and autocast's device."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import FSDPStrategy

    from mpbridge.backend.devices import device_layer

    wrapper = torch.distributed.fsdp.FullyShardedDataParallel

    class OnCpu(wrapper):
        """It takes a CPU only by name."""

        def __init__(self, *args: Any, device_id: Any = None, **how: Any) -> None:
            super().__init__(*args, device_id=torch.device("cpu"), **how)

    class OnAnyDevice(FSDPStrategy):
        def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
            torch.distributed.fsdp.FullyShardedDataParallel = OnCpu
            try:
                return super()._setup_model(model)
            finally:
                torch.distributed.fsdp.FullyShardedDataParallel = wrapper

    follows = lightning_callback(at={2})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=OnAnyDevice(use_orig_params=True),
        precision=precision,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[follows],
    )
    with device_layer(False):
        trainer.fit(
            lightning_module(), torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (64, 8)), batch_size=4)
        )
    return follows.report


# --- FSDP2 under tensor parallelism ------------------------------------------------------------------------------------------------------------
def fsdp2_under_tensor_parallelism() -> Witnessed:
    """Linears cut over two ranks, then sharded over the others."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    plan = {
        "layers.0": ColwiseParallel(output_layouts=Replicate()),
        "layers.1": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    optimizer = adam(model)
    seen = witness(model, optimizer, at={2})
    for step in range(2):
        batch = torch.randint(
            0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(97 * step + dist.get_rank() // 2)
        )
        with seen.step():
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.report


# --- copies of shards --------------------------------------------------------------------------------------------------------------------------
def hybrid() -> Witnessed:
    """FSDP2 over a mesh of two dimensions: shards within one, copies of them along the other."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards"))
    model = Net()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    return two_steps(model, adam(model))


CASES: tuple[Case, ...] = (
    Case("torchtitan", "nothing said", torchtitan, several=True),
    Case("torchtitan", "training.dtype=bfloat16", lambda: torchtitan("bfloat16"), several=True),
    Case("automodel", "torch_dtype with torch's AdamW, fsdp2", lambda: automodel(_by_fsdp2), several=True),
    Case("automodel", "torch_dtype with FusedAdam(master_weights, remainders)", fused_adam, several=True),
    Case("automodel", "model in BF16: no policy is read", lambda: automodel(_by_ddp), word="ddp", several=True),
    Case("lightning", "FSDP", lambda: lightning_fsdp("bf16-mixed"), word="bf16-mixed", several=True),
    Case("lightning", "FSDP", lambda: lightning_fsdp("bf16-true"), word="bf16-true", several=True),
    Case(
        "fsdp2",
        "MixedPrecisionPolicy with nothing else said, module in FP32",
        fsdp2_under_tensor_parallelism,
        several=True,
        ranks=4,
    ),
    Case("fsdp2", "MixedPrecisionPolicy with nothing else said, module in FP32", hybrid, several=True, ranks=4),
)
