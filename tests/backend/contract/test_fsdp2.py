"""torch FSDP2 under the engine contract."""

from typing import ClassVar

from tests.backend.contract.engine_contract import EngineContract


class TestFsdp2(EngineContract):
    name = "fsdp2"
    kinds = ("fp32", "bf16", "bf16_params_fp32_states", "fp32_params_bf16_compute", "bf16_mixed_bf16_moments")

    keeps: ClassVar[dict[str, str]] = {
        "fp32": "computes fp32; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
        "bf16": "computes bf16; params bf16; updates bf16; exp_avg fp32, exp_avg_sq fp32, master_param fp32",
        "bf16_params_fp32_states": "computes bf16; params bf16; updates bf16; exp_avg fp32, exp_avg_sq fp32, master_param int16",
        "fp32_params_bf16_compute": "computes bf16; params fp32; updates fp32; exp_avg fp32, exp_avg_sq fp32",
        "bf16_mixed_bf16_moments": "computes bf16; params bf16; updates bf16; exp_avg bf16, exp_avg_sq bf16, master_param int16",
    }
