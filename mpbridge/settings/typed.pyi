"""The settings of ConfigContainer's sections, as editors and mypy see them. Written by scripts/generate/make_typing.py; imported at run time by nothing."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import torch

from mpbridge.settings.schema import Section
from mpbridge.common.formats import DType

Dtype: TypeAlias = str | torch.dtype | DType

class ConfigObject(Protocol):
    """One of megatron-core's config objects, given in place of a section."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

Read = TypeVar("Read", covariant=True)
Given = TypeVar("Given", contravariant=True)

class SectionField(Protocol[Read, Given]):
    """A section is given as a mapping or a config object, and read as a mapping with attributes."""

    def __get__(self, owner: object, kind: Any = None) -> Read: ...
    def __set__(self, owner: object, value: Given | ConfigObject | None) -> None: ...

class ModelSettings(TypedDict, total=False):
    """Keys of `model`."""

    vocab_size: int | None
    max_sequence_length: int | None
    position_embedding_type: Literal['learned_absolute', 'rope', 'yarn', 'none']
    rotary_base: float
    rotary_percent: float
    rope_scaling: bool
    rope_scaling_factor: float
    seq_len_interpolation_factor: float | None
    yarn_rotary_scaling_factor: float | None
    yarn_original_max_position_embeddings: int | None
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float | None
    yarn_mscale_all_dim: float | None
    yarn_correction_range_round_to_int: bool
    share_embeddings_and_output_weights: bool
    fp16_lm_cross_entropy: bool
    hybrid_override_pattern: str | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: list[str] | None
    tensor_model_parallel_size: int
    tensor_parallel_num_weight_shards: int | None
    gtp_weight_remat_size: int
    pipeline_model_parallel_comm_backend: Literal['nccl', 'ucc'] | None
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: list[int] | None
    max_seqlen_per_dp_cp_rank: int | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    expert_tensor_parallel_num_weight_shards: int | None
    expert_gtp_weight_remat_size: int
    perform_initialization: bool
    use_cpu_initialization: bool
    fp16: bool
    bf16: bool
    params_dtype: Dtype
    timers: Any
    finalize_model_grads_func: Any
    grad_scale_func: Any
    moe_grad_scale_func: Any
    mtp_grad_scale_func: Any
    no_sync_func: Any
    grad_sync_func: Any
    param_sync_func: Any
    deterministic_mode: bool
    enable_autocast: bool
    autocast_dtype: Dtype | None
    num_microbatches_with_partial_activation_checkpoints: int | None
    gradient_accumulation_fusion: bool
    use_te_rng_tracker: bool
    tp_comm_overlap: bool
    tp_comm_bulk_wgrad: bool
    tp_comm_bulk_dgrad: bool
    tp_comm_overlap_ag: bool
    tp_comm_overlap_rs: bool
    tp_comm_overlap_rs_dgrad: bool
    tp_comm_split_ag: bool
    tp_comm_atomic_ag: bool
    tp_comm_split_rs: bool
    tp_comm_atomic_rs: bool
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: Literal['native', 'te']
    tp_comm_overlap_disable_qkv: bool
    tp_comm_overlap_disable_fc1: bool
    tp_comm_bootstrap_backend: Literal['nccl', 'mpi', 'gloo']
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool
    overlap_dispatch_backward_with_experts_wgrad: bool
    ep_overlap_early_attn_memory_release: bool
    pipeline_dtype: Dtype | None
    variable_seq_lengths: bool
    overlap_p2p_comm: bool
    batch_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool
    deallocate_pipeline_outputs: bool
    defer_embedding_wgrad_compute: bool
    wgrad_deferral_limit: int
    overlap_p2p_comm_warmup_flush: bool
    microbatch_group_size_per_vp_stage: int | None
    mtp_standalone: bool
    cpu_offloading: bool
    cpu_offloading_num_layers: int
    cpu_offloading_activations: bool
    cpu_offloading_weights: bool
    cpu_offloading_double_buffering: bool
    cpu_offloading_retain_pinned_cpu_buffers: bool
    barrier_with_L1_time: bool
    num_layers: int
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float | None
    mtp_use_repeated_layer: bool
    mtp_detach_heads: bool
    mtp_hsm: bool
    mtp_hybrid_override_pattern: str | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    pipeline_model_parallel_layout: Any
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    hidden_size: int
    num_attention_heads: int
    attention_backend: Literal['flash', 'fused', 'unfused', 'local', 'auto']
    flash_attention_version: Literal[2, 3, 4] | None
    softmax_scale: float | None
    softmax_type: Literal['vanilla', 'off-by-one', 'learnable']
    num_query_groups: int | None
    ffn_hidden_size: int | None
    kv_channels: int | None
    hidden_dropout: float
    attention_dropout: float
    fp32_residual_connection: bool
    apply_residual_connection_post_layernorm: bool
    layernorm_epsilon: float
    layernorm_zero_centered_gamma: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    gated_linear_unit: bool
    activation_func: str | Callable[..., Any]
    activation_func_fp8_input_store: bool
    glu_linear_offset: float
    activation_func_clamp_value: float | None
    num_moe_experts: int | None
    rotary_interleaved: bool
    window_size: list[int] | None
    window_attn_skip_freq: int | list[int] | None
    normalization: Literal['LayerNorm', 'RMSNorm']
    qk_layernorm: bool
    qk_l2_norm: bool
    qk_clip: bool
    qk_clip_alpha: float
    qk_clip_threshold: float
    log_max_attention_logit: bool
    attention_output_gate: bool
    test_mode: bool
    calculate_per_token_loss: bool
    multi_latent_attention: bool
    no_rope_freq: int | list[int] | None
    experimental_attention_variant: Literal['gated_delta_net', 'dsa'] | None
    experimental_attention_variant_loss_scale_func: Any
    dsa_indexer_n_heads: int | None
    dsa_indexer_head_dim: int | None
    dsa_indexer_topk: int | None
    dsa_indexer_topk_freq: int
    dsa_indexer_skip_topk_offset: int
    dsa_indexer_loss_coeff: float | None
    dsa_indexer_use_sparse_loss: bool
    dsa_kernel_backend: Literal['none', 'tilelang', 'cudnn']
    dsa_indexer_rope_interleaved: bool
    dsa_indexer_rotate_activation: bool
    dsa_indexer_scoring_relu: bool
    dsa_indexer_k_norm_epsilon: float | None
    dsa_indexer_k_norm_fp32: bool
    linear_attention_freq: int | list[int] | None
    linear_conv_kernel_dim: int | None
    linear_key_head_dim: int | None
    linear_value_head_dim: int | None
    linear_num_key_heads: int | None
    linear_num_value_heads: int | None
    init_method: Any
    output_layer_init_method: Any
    init_method_std: float
    embedding_init_method: Any
    embedding_init_method_std: float | None
    init_model_with_meta_device: bool
    use_mup: bool
    mup_width_mult: float
    mup_base_hidden_size: int | None
    mup_embedding_mult: float
    mup_output_mult: float
    mup_base_head_dim: float | None
    mup_attn_scale_power: float
    apply_query_key_layer_scaling: bool
    attention_softmax_in_fp32: bool
    disable_bf16_reduced_precision_matmul: bool
    bias_activation_fusion: bool
    masked_softmax_fusion: bool
    persist_layer_norm: bool
    memory_efficient_layer_norm: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    use_fused_weighted_squared_relu: bool
    fused_single_qkv_rope: bool
    fused_residual_rmsnorm: bool
    use_transformer_engine_op_fuser: bool
    recompute_granularity: Literal['full', 'selective'] | None
    recompute_method: Literal['uniform', 'block'] | None
    recompute_num_layers: int | None
    distribute_saved_activations: bool | None
    recompute_modules: list[str] | None
    fp8: Literal['e4m3', 'hybrid'] | None
    fp8_recipe: Literal['tensorwise', 'delayed', 'mxfp8', 'blockwise', 'custom'] | None
    fp8_param: bool
    fp8_quantizer_factory: str | None
    fp8_margin: int
    fp8_interval: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: Literal['most_recent', 'max']
    fp8_wgrad: bool
    fp8_output_proj: bool
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    tp_only_amax_red: bool
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    use_kitchen: bool
    use_kitchen_attention: bool
    kitchen_attention_backend: Literal['sdpa', 'fa']
    fp4: Literal['e2m1'] | None
    fp4_recipe: Literal['nvfp4', 'custom'] | None
    fp4_param: bool
    fp4_quantizer_factory: str | None
    high_priority_a2a_comm_stream: bool
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_shared_expert_overlap: bool
    use_grouped_gemm_for_shared_expert: bool
    moe_shared_expert_glu_interleave_size: int | None
    moe_layer_freq: int | list[int]
    moe_ffn_hidden_size: int | None
    moe_router_load_balancing_type: Literal['aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn', 'none'] | list[Literal['aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn', 'none']]
    moe_router_topk: int
    moe_enable_routing_replay: bool
    moe_router_topk_limited_devices: int | None
    moe_router_padding_for_quantization: bool | None
    moe_router_padding_for_fp8: bool | None
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_pre_softmax: bool
    moe_router_topk_scaling_factor: float | None
    moe_router_score_function: Literal['softmax', 'sigmoid']
    moe_router_dtype: Literal['fp32', 'fp64'] | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_router_quantile_balancing_ema: float
    moe_router_force_load_balancing: bool
    moe_router_force_biased: float | None
    use_grouped_gemm_for_dense_mlp: bool
    moe_grouped_gemm: bool
    moe_use_grouped_tensor: bool
    moe_single_grouped_weight: bool
    moe_single_grouped_bias: bool
    moe_aux_loss_coeff: float | list[float]
    moe_z_loss_coeff: float | None
    moe_input_jitter_eps: float | None
    moe_token_dropping: bool
    moe_token_dispatcher_type: Literal['allgather', 'alltoall', 'flex']
    moe_enable_deepep: bool
    moe_flex_dispatcher_backend: Literal['deepep', 'hybridep']
    moe_permute_fusion_into_hybridep: bool
    moe_hybridep_pad_uneven_dispatch_inputs: bool
    moe_per_layer_logging: bool
    moe_expert_capacity_factor: float | None
    moe_pad_expert_input_to_capacity: bool
    moe_pad_experts_for_cuda_graph_inference: bool
    moe_token_drop_policy: Literal['probs', 'position']
    moe_layer_recompute: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    moe_apply_probs_on_input: bool
    moe_latent_size: int | None
    gtp_remat_opt_in_modules: list[str]
    moe_flex_dispatcher_num_sms: int | None
    moe_deepep_num_sms: int
    moe_hybridep_num_sms: int
    moe_hybridep_num_blocks_permute: int | None
    moe_hybridep_num_blocks_unpermute: int | None
    moe_hybridep_num_sms_preprocessing: int
    moe_ncclep_zero_copy: bool
    moe_dispatch_fwd_dtype: Literal['bf16', 'mxfp8']
    moe_combine_bwd_dtype: Literal['bf16', 'mxfp8']
    moe_mlp_glu_interleave_size: int | None
    moe_expert_rank_capacity_factor: float | None
    cp_comm_type: str | list[str] | None
    enable_cuda_graph: bool
    cuda_graph_use_single_mempool: bool
    cuda_graph_retain_backward_graph: bool
    cuda_graph_warmup_steps: int
    external_cuda_graph: bool
    cuda_graph_impl: Literal['none', 'local', 'transformer_engine']
    cuda_graph_modules: str | Literal['attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba'] | list[str] | list[Literal['attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba']]
    inference_cuda_graph_scope: Literal['none', 'layer', 'block'] | None
    cuda_graph_scope: str | Literal['full_iteration', 'attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba'] | list[str] | list[Literal['full_iteration', 'attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba']]
    enable_mhc_connections: bool
    mhc_num_residual_streams: int
    mhc_sinkhorn_iterations: int
    mhc_init_gating_factor: float
    mhc_recompute_layer_num: int | None
    clone_scatter_output_in_embedding: bool
    disable_parameter_transpose_cache: bool
    config_logger_dir: str
    flash_decode: bool
    batch_invariant_mode: bool
    batch_invariant_backend: Literal['te_native', 'deepgemm', 'triton']
    use_te_activation_func: bool
    inference_rng_tracker: bool
    inference_sampling_seed: int
    symmetric_ar_type: Literal['two_shot', 'one_shot', 'multimem_all_reduce'] | None
    nccl_all_reduce_for_prefill: bool
    use_inference_optimized_layers: bool
    inference_fuse_tp_communication: bool
    inference_disable_triton_nvls_kernels: bool
    inference_grouped_gemm_backend: Literal['flashinfer', 'torch', 'vllm']
    inference_moe_disable_fused_quant_kernels: bool
    inference_moe_token_dispatcher_type: Literal['nccl', 'nvls']
    mrope_section: list[int] | None
    is_hybrid_model: bool
    mamba_state_dim: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_num_heads: int | None
    gdp_num_householder: int
    mamba_training_ssm_states_dtype: Dtype | None
    use_mamba_mem_eff_path: bool
    gdp_cutedsl_kernel: bool
    gdp_num_chunk_states_to_recompute: int
    mlp_chunks_for_prefill: int
    mlp_chunks_for_training: int
    heterogeneous_block_specs: bool
    hetereogenous_dist_checkpoint: bool
    quant_recipe: Any
    transformer_impl: Literal['local', 'transformer_engine', 'inference_optimized']
    fine_grained_activation_offloading: bool
    offload_modules: list[str] | None
    min_offloaded_tensor_size: int
    delay_offload_until_cuda_graph: bool
    delta_offload_bytes_across_pp_ranks: int
    activation_offload_fraction: float
    moe_paged_stash: bool
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    fine_grained_offloading_max_inflight_offloads: int | None
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rope_type: Literal['yarn', 'rope']
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    cache_mla_latents: bool
    mla_down_proj_fusion: bool
    moe_extended_tp: bool
    async_tensor_model_parallel_allreduce: bool
    moe_use_legacy_grouped_gemm: bool

class ModelSection(Section):
    """`ConfigContainer.model`."""

    vocab_size: int | None
    max_sequence_length: int | None
    position_embedding_type: Literal['learned_absolute', 'rope', 'yarn', 'none']
    rotary_base: float
    rotary_percent: float
    rope_scaling: bool
    rope_scaling_factor: float
    seq_len_interpolation_factor: float | None
    yarn_rotary_scaling_factor: float | None
    yarn_original_max_position_embeddings: int | None
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float | None
    yarn_mscale_all_dim: float | None
    yarn_correction_range_round_to_int: bool
    share_embeddings_and_output_weights: bool
    fp16_lm_cross_entropy: bool
    hybrid_override_pattern: str | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: list[str] | None
    tensor_model_parallel_size: int
    tensor_parallel_num_weight_shards: int | None
    gtp_weight_remat_size: int
    pipeline_model_parallel_comm_backend: Literal['nccl', 'ucc'] | None
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: list[int] | None
    max_seqlen_per_dp_cp_rank: int | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    expert_tensor_parallel_num_weight_shards: int | None
    expert_gtp_weight_remat_size: int
    perform_initialization: bool
    use_cpu_initialization: bool
    fp16: bool
    bf16: bool
    params_dtype: Dtype
    timers: Any
    finalize_model_grads_func: Any
    grad_scale_func: Any
    moe_grad_scale_func: Any
    mtp_grad_scale_func: Any
    no_sync_func: Any
    grad_sync_func: Any
    param_sync_func: Any
    deterministic_mode: bool
    enable_autocast: bool
    autocast_dtype: Dtype | None
    num_microbatches_with_partial_activation_checkpoints: int | None
    gradient_accumulation_fusion: bool
    use_te_rng_tracker: bool
    tp_comm_overlap: bool
    tp_comm_bulk_wgrad: bool
    tp_comm_bulk_dgrad: bool
    tp_comm_overlap_ag: bool
    tp_comm_overlap_rs: bool
    tp_comm_overlap_rs_dgrad: bool
    tp_comm_split_ag: bool
    tp_comm_atomic_ag: bool
    tp_comm_split_rs: bool
    tp_comm_atomic_rs: bool
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: Literal['native', 'te']
    tp_comm_overlap_disable_qkv: bool
    tp_comm_overlap_disable_fc1: bool
    tp_comm_bootstrap_backend: Literal['nccl', 'mpi', 'gloo']
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool
    overlap_dispatch_backward_with_experts_wgrad: bool
    ep_overlap_early_attn_memory_release: bool
    pipeline_dtype: Dtype | None
    variable_seq_lengths: bool
    overlap_p2p_comm: bool
    batch_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool
    deallocate_pipeline_outputs: bool
    defer_embedding_wgrad_compute: bool
    wgrad_deferral_limit: int
    overlap_p2p_comm_warmup_flush: bool
    microbatch_group_size_per_vp_stage: int | None
    mtp_standalone: bool
    cpu_offloading: bool
    cpu_offloading_num_layers: int
    cpu_offloading_activations: bool
    cpu_offloading_weights: bool
    cpu_offloading_double_buffering: bool
    cpu_offloading_retain_pinned_cpu_buffers: bool
    barrier_with_L1_time: bool
    num_layers: int
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float | None
    mtp_use_repeated_layer: bool
    mtp_detach_heads: bool
    mtp_hsm: bool
    mtp_hybrid_override_pattern: str | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    pipeline_model_parallel_layout: Any
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    hidden_size: int
    num_attention_heads: int
    attention_backend: Literal['flash', 'fused', 'unfused', 'local', 'auto']
    flash_attention_version: Literal[2, 3, 4] | None
    softmax_scale: float | None
    softmax_type: Literal['vanilla', 'off-by-one', 'learnable']
    num_query_groups: int | None
    ffn_hidden_size: int | None
    kv_channels: int | None
    hidden_dropout: float
    attention_dropout: float
    fp32_residual_connection: bool
    apply_residual_connection_post_layernorm: bool
    layernorm_epsilon: float
    layernorm_zero_centered_gamma: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    gated_linear_unit: bool
    activation_func: str | Callable[..., Any]
    activation_func_fp8_input_store: bool
    glu_linear_offset: float
    activation_func_clamp_value: float | None
    num_moe_experts: int | None
    rotary_interleaved: bool
    window_size: list[int] | None
    window_attn_skip_freq: int | list[int] | None
    normalization: Literal['LayerNorm', 'RMSNorm']
    qk_layernorm: bool
    qk_l2_norm: bool
    qk_clip: bool
    qk_clip_alpha: float
    qk_clip_threshold: float
    log_max_attention_logit: bool
    attention_output_gate: bool
    test_mode: bool
    calculate_per_token_loss: bool
    multi_latent_attention: bool
    no_rope_freq: int | list[int] | None
    experimental_attention_variant: Literal['gated_delta_net', 'dsa'] | None
    experimental_attention_variant_loss_scale_func: Any
    dsa_indexer_n_heads: int | None
    dsa_indexer_head_dim: int | None
    dsa_indexer_topk: int | None
    dsa_indexer_topk_freq: int
    dsa_indexer_skip_topk_offset: int
    dsa_indexer_loss_coeff: float | None
    dsa_indexer_use_sparse_loss: bool
    dsa_kernel_backend: Literal['none', 'tilelang', 'cudnn']
    dsa_indexer_rope_interleaved: bool
    dsa_indexer_rotate_activation: bool
    dsa_indexer_scoring_relu: bool
    dsa_indexer_k_norm_epsilon: float | None
    dsa_indexer_k_norm_fp32: bool
    linear_attention_freq: int | list[int] | None
    linear_conv_kernel_dim: int | None
    linear_key_head_dim: int | None
    linear_value_head_dim: int | None
    linear_num_key_heads: int | None
    linear_num_value_heads: int | None
    init_method: Any
    output_layer_init_method: Any
    init_method_std: float
    embedding_init_method: Any
    embedding_init_method_std: float | None
    init_model_with_meta_device: bool
    use_mup: bool
    mup_width_mult: float
    mup_base_hidden_size: int | None
    mup_embedding_mult: float
    mup_output_mult: float
    mup_base_head_dim: float | None
    mup_attn_scale_power: float
    apply_query_key_layer_scaling: bool
    attention_softmax_in_fp32: bool
    disable_bf16_reduced_precision_matmul: bool
    bias_activation_fusion: bool
    masked_softmax_fusion: bool
    persist_layer_norm: bool
    memory_efficient_layer_norm: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    use_fused_weighted_squared_relu: bool
    fused_single_qkv_rope: bool
    fused_residual_rmsnorm: bool
    use_transformer_engine_op_fuser: bool
    recompute_granularity: Literal['full', 'selective'] | None
    recompute_method: Literal['uniform', 'block'] | None
    recompute_num_layers: int | None
    distribute_saved_activations: bool | None
    recompute_modules: list[str] | None
    fp8: Literal['e4m3', 'hybrid'] | None
    fp8_recipe: Literal['tensorwise', 'delayed', 'mxfp8', 'blockwise', 'custom'] | None
    fp8_param: bool
    fp8_quantizer_factory: str | None
    fp8_margin: int
    fp8_interval: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: Literal['most_recent', 'max']
    fp8_wgrad: bool
    fp8_output_proj: bool
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    tp_only_amax_red: bool
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    use_kitchen: bool
    use_kitchen_attention: bool
    kitchen_attention_backend: Literal['sdpa', 'fa']
    fp4: Literal['e2m1'] | None
    fp4_recipe: Literal['nvfp4', 'custom'] | None
    fp4_param: bool
    fp4_quantizer_factory: str | None
    high_priority_a2a_comm_stream: bool
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_shared_expert_overlap: bool
    use_grouped_gemm_for_shared_expert: bool
    moe_shared_expert_glu_interleave_size: int | None
    moe_layer_freq: int | list[int]
    moe_ffn_hidden_size: int | None
    moe_router_load_balancing_type: Literal['aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn', 'none'] | list[Literal['aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn', 'none']]
    moe_router_topk: int
    moe_enable_routing_replay: bool
    moe_router_topk_limited_devices: int | None
    moe_router_padding_for_quantization: bool | None
    moe_router_padding_for_fp8: bool | None
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_pre_softmax: bool
    moe_router_topk_scaling_factor: float | None
    moe_router_score_function: Literal['softmax', 'sigmoid']
    moe_router_dtype: Literal['fp32', 'fp64'] | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_router_quantile_balancing_ema: float
    moe_router_force_load_balancing: bool
    moe_router_force_biased: float | None
    use_grouped_gemm_for_dense_mlp: bool
    moe_grouped_gemm: bool
    moe_use_grouped_tensor: bool
    moe_single_grouped_weight: bool
    moe_single_grouped_bias: bool
    moe_aux_loss_coeff: float | list[float]
    moe_z_loss_coeff: float | None
    moe_input_jitter_eps: float | None
    moe_token_dropping: bool
    moe_token_dispatcher_type: Literal['allgather', 'alltoall', 'flex']
    moe_enable_deepep: bool
    moe_flex_dispatcher_backend: Literal['deepep', 'hybridep']
    moe_permute_fusion_into_hybridep: bool
    moe_hybridep_pad_uneven_dispatch_inputs: bool
    moe_per_layer_logging: bool
    moe_expert_capacity_factor: float | None
    moe_pad_expert_input_to_capacity: bool
    moe_pad_experts_for_cuda_graph_inference: bool
    moe_token_drop_policy: Literal['probs', 'position']
    moe_layer_recompute: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    moe_apply_probs_on_input: bool
    moe_latent_size: int | None
    gtp_remat_opt_in_modules: list[str]
    moe_flex_dispatcher_num_sms: int | None
    moe_deepep_num_sms: int
    moe_hybridep_num_sms: int
    moe_hybridep_num_blocks_permute: int | None
    moe_hybridep_num_blocks_unpermute: int | None
    moe_hybridep_num_sms_preprocessing: int
    moe_ncclep_zero_copy: bool
    moe_dispatch_fwd_dtype: Literal['bf16', 'mxfp8']
    moe_combine_bwd_dtype: Literal['bf16', 'mxfp8']
    moe_mlp_glu_interleave_size: int | None
    moe_expert_rank_capacity_factor: float | None
    cp_comm_type: str | list[str] | None
    enable_cuda_graph: bool
    cuda_graph_use_single_mempool: bool
    cuda_graph_retain_backward_graph: bool
    cuda_graph_warmup_steps: int
    external_cuda_graph: bool
    cuda_graph_impl: Literal['none', 'local', 'transformer_engine']
    cuda_graph_modules: str | Literal['attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba'] | list[str] | list[Literal['attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba']]
    inference_cuda_graph_scope: Literal['none', 'layer', 'block'] | None
    cuda_graph_scope: str | Literal['full_iteration', 'attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba'] | list[str] | list[Literal['full_iteration', 'attn', 'mlp', 'moe', 'moe_router', 'moe_preprocess', 'mamba']]
    enable_mhc_connections: bool
    mhc_num_residual_streams: int
    mhc_sinkhorn_iterations: int
    mhc_init_gating_factor: float
    mhc_recompute_layer_num: int | None
    clone_scatter_output_in_embedding: bool
    disable_parameter_transpose_cache: bool
    config_logger_dir: str
    flash_decode: bool
    batch_invariant_mode: bool
    batch_invariant_backend: Literal['te_native', 'deepgemm', 'triton']
    use_te_activation_func: bool
    inference_rng_tracker: bool
    inference_sampling_seed: int
    symmetric_ar_type: Literal['two_shot', 'one_shot', 'multimem_all_reduce'] | None
    nccl_all_reduce_for_prefill: bool
    use_inference_optimized_layers: bool
    inference_fuse_tp_communication: bool
    inference_disable_triton_nvls_kernels: bool
    inference_grouped_gemm_backend: Literal['flashinfer', 'torch', 'vllm']
    inference_moe_disable_fused_quant_kernels: bool
    inference_moe_token_dispatcher_type: Literal['nccl', 'nvls']
    mrope_section: list[int] | None
    is_hybrid_model: bool
    mamba_state_dim: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_num_heads: int | None
    gdp_num_householder: int
    mamba_training_ssm_states_dtype: Dtype | None
    use_mamba_mem_eff_path: bool
    gdp_cutedsl_kernel: bool
    gdp_num_chunk_states_to_recompute: int
    mlp_chunks_for_prefill: int
    mlp_chunks_for_training: int
    heterogeneous_block_specs: bool
    hetereogenous_dist_checkpoint: bool
    quant_recipe: Any
    transformer_impl: Literal['local', 'transformer_engine', 'inference_optimized']
    fine_grained_activation_offloading: bool
    offload_modules: list[str] | None
    min_offloaded_tensor_size: int
    delay_offload_until_cuda_graph: bool
    delta_offload_bytes_across_pp_ranks: int
    activation_offload_fraction: float
    moe_paged_stash: bool
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    fine_grained_offloading_max_inflight_offloads: int | None
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rope_type: Literal['yarn', 'rope']
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    cache_mla_latents: bool
    mla_down_proj_fusion: bool
    moe_extended_tp: bool
    async_tensor_model_parallel_allreduce: bool
    moe_use_legacy_grouped_gemm: bool

ModelField: TypeAlias = SectionField[ModelSection, ModelSettings | ModelSection]

class OptimizerSettings(TypedDict, total=False):
    """Keys of `optimizer`."""

    lr: float | None
    min_lr: float | None
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    weight_decay: float
    apply_wd_to_qk_layernorm: bool
    fp8_recipe: str | None
    fp16: bool
    bf16: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    params_dtype: Dtype
    use_precision_aware_optimizer: bool
    store_param_remainders: bool
    main_grads_dtype: Dtype
    main_params_dtype: Dtype
    exp_avg_dtype: Dtype
    exp_avg_sq_dtype: Dtype
    optimizer: Literal['adam', 'torch_adamw', 'sgd', 'muon', 'dist_muon', 'soap', 'lion']
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: float
    hysteresis: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    sgd_momentum: float
    muon_momentum: float
    muon_split_qkv: bool
    muon_nesterov: bool
    muon_scale_mode: str
    muon_fp32_matmul_prec: str
    muon_coefficient_type: str
    muon_num_ns_steps: int
    muon_tp_mode: str
    muon_use_syrk: bool
    muon_extra_scale_factor: float
    muon_scalar_optimizer: str
    lion_beta1: float
    lion_beta2: float
    soap_shampoo_beta: float
    soap_use_kl_shampoo: bool
    adaptive_muon_moment2_method: str
    adaptive_muon_beta2: float
    adaptive_muon_eps: float
    use_distributed_optimizer: bool
    use_layer_wise_distributed_optimizer: bool
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    use_torch_optimizer_for_cpu_offload: bool
    overlap_cpu_optimizer_d2h_h2d: bool
    pin_cpu_grads: bool
    pin_cpu_params: bool
    clip_grad: float
    grad_norm_skip_threshold: float
    log_num_zeros_in_grad: bool
    barrier_with_L1_time: bool
    timers: Any
    config_logger_dir: str
    optimizer_cuda_graph: bool
    muon_use_nesterov: bool

class OptimizerSection(Section):
    """`ConfigContainer.optimizer`."""

    lr: float | None
    min_lr: float | None
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    weight_decay: float
    apply_wd_to_qk_layernorm: bool
    fp8_recipe: str | None
    fp16: bool
    bf16: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    params_dtype: Dtype
    use_precision_aware_optimizer: bool
    store_param_remainders: bool
    main_grads_dtype: Dtype
    main_params_dtype: Dtype
    exp_avg_dtype: Dtype
    exp_avg_sq_dtype: Dtype
    optimizer: Literal['adam', 'torch_adamw', 'sgd', 'muon', 'dist_muon', 'soap', 'lion']
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: float
    hysteresis: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    sgd_momentum: float
    muon_momentum: float
    muon_split_qkv: bool
    muon_nesterov: bool
    muon_scale_mode: str
    muon_fp32_matmul_prec: str
    muon_coefficient_type: str
    muon_num_ns_steps: int
    muon_tp_mode: str
    muon_use_syrk: bool
    muon_extra_scale_factor: float
    muon_scalar_optimizer: str
    lion_beta1: float
    lion_beta2: float
    soap_shampoo_beta: float
    soap_use_kl_shampoo: bool
    adaptive_muon_moment2_method: str
    adaptive_muon_beta2: float
    adaptive_muon_eps: float
    use_distributed_optimizer: bool
    use_layer_wise_distributed_optimizer: bool
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    use_torch_optimizer_for_cpu_offload: bool
    overlap_cpu_optimizer_d2h_h2d: bool
    pin_cpu_grads: bool
    pin_cpu_params: bool
    clip_grad: float
    grad_norm_skip_threshold: float
    log_num_zeros_in_grad: bool
    barrier_with_L1_time: bool
    timers: Any
    config_logger_dir: str
    optimizer_cuda_graph: bool
    muon_use_nesterov: bool

OptimizerField: TypeAlias = SectionField[OptimizerSection, OptimizerSettings | OptimizerSection]

class SchedulerSettings(TypedDict, total=False):
    """Keys of `scheduler`."""

    lr_decay_style: Literal['constant', 'linear', 'cosine', 'inverse-square-root', 'WSD']
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_wsd_decay_style: Literal['linear', 'cosine', 'exponential', 'minus_sqrt']
    lr_wsd_decay_iters: int | None
    start_weight_decay: float | None
    end_weight_decay: float | None
    weight_decay_incr_style: Literal['constant', 'linear', 'cosine']
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool

class SchedulerSection(Section):
    """`ConfigContainer.scheduler`."""

    lr_decay_style: Literal['constant', 'linear', 'cosine', 'inverse-square-root', 'WSD']
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_wsd_decay_style: Literal['linear', 'cosine', 'exponential', 'minus_sqrt']
    lr_wsd_decay_iters: int | None
    start_weight_decay: float | None
    end_weight_decay: float | None
    weight_decay_incr_style: Literal['constant', 'linear', 'cosine']
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool

SchedulerField: TypeAlias = SectionField[SchedulerSection, SchedulerSettings | SchedulerSection]

class DDPSettings(TypedDict, total=False):
    """Keys of `ddp`."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    align_param_gather: bool
    use_distributed_optimizer: bool
    num_distributed_optimizer_instances: int
    check_for_nan_in_grad: bool
    check_for_large_grads: bool
    bucket_size: int | None
    num_buckets: int | None
    pad_buckets_for_high_nccl_busbw: bool
    reduce_scatter_with_fp32_accumulation: bool
    param_name_patterns_for_fp32_local_accumulation: list[str]
    average_in_collective: bool
    fp8_param_gather: bool
    fp4_param_gather: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    use_megatron_fsdp: bool
    megatron_fsdp_version: int
    use_custom_fsdp: bool
    data_parallel_sharding_strategy: Literal['no_shard', 'optim', 'optim_grads', 'optim_grads_params']
    gradient_reduce_div_fusion: bool
    suggested_communication_unit_size: int | None
    keep_fp8_transpose_cache: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    fsdp_db_use_persist_buf_on_alloc_fail: bool
    fsdp_all_gather_in_start_param_sync: bool
    outer_dp_sharding_strategy: Literal['no_shard', 'optim']
    disable_symmetric_registration: bool
    fsdp_manual_registration: bool
    delay_wgrad_compute: bool
    megatron_fsdp_main_params_dtype: Dtype | None
    megatron_fsdp_main_grads_dtype: Dtype | None
    megatron_fsdp_grad_comm_dtype: Dtype | None
    megatron_fsdp_use_decoupled_grad: bool
    megatron_fsdp_cuda_graph_mode: bool
    megatron_fsdp_enable_fine_grained_param_gather: bool
    megatron_fsdp_max_pool_double_buffer: bool
    preserve_fp32_weights: bool

class DDPSection(Section):
    """`ConfigContainer.ddp`."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    align_param_gather: bool
    use_distributed_optimizer: bool
    num_distributed_optimizer_instances: int
    check_for_nan_in_grad: bool
    check_for_large_grads: bool
    bucket_size: int | None
    num_buckets: int | None
    pad_buckets_for_high_nccl_busbw: bool
    reduce_scatter_with_fp32_accumulation: bool
    param_name_patterns_for_fp32_local_accumulation: list[str]
    average_in_collective: bool
    fp8_param_gather: bool
    fp4_param_gather: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    use_megatron_fsdp: bool
    megatron_fsdp_version: int
    use_custom_fsdp: bool
    data_parallel_sharding_strategy: Literal['no_shard', 'optim', 'optim_grads', 'optim_grads_params']
    gradient_reduce_div_fusion: bool
    suggested_communication_unit_size: int | None
    keep_fp8_transpose_cache: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    fsdp_db_use_persist_buf_on_alloc_fail: bool
    fsdp_all_gather_in_start_param_sync: bool
    outer_dp_sharding_strategy: Literal['no_shard', 'optim']
    disable_symmetric_registration: bool
    fsdp_manual_registration: bool
    delay_wgrad_compute: bool
    megatron_fsdp_main_params_dtype: Dtype | None
    megatron_fsdp_main_grads_dtype: Dtype | None
    megatron_fsdp_grad_comm_dtype: Dtype | None
    megatron_fsdp_use_decoupled_grad: bool
    megatron_fsdp_cuda_graph_mode: bool
    megatron_fsdp_enable_fine_grained_param_gather: bool
    megatron_fsdp_max_pool_double_buffer: bool
    preserve_fp32_weights: bool

DDPField: TypeAlias = SectionField[DDPSection, DDPSettings | DDPSection]

class ParallelSettings(TypedDict, total=False):
    """Keys of `parallel`."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool

class ParallelSection(Section):
    """`ConfigContainer.parallel`."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool

ParallelField: TypeAlias = SectionField[ParallelSection, ParallelSettings | ParallelSection]

class TrainSettings(TypedDict, total=False):
    """Keys of `train`."""

    micro_batch_size: int | None
    global_batch_size: int
    train_iters: int | None
    eval_interval: int | None
    eval_iters: int
    seed: int
    log_interval: int
    threads: int | None
    deterministic: bool
    exit_interval: int | None
    timeout_minutes: float
    nonfinite: str
    audit: Literal['stop', 'warn']

class TrainSection(Section):
    """`ConfigContainer.train`."""

    micro_batch_size: int | None
    global_batch_size: int
    train_iters: int | None
    eval_interval: int | None
    eval_iters: int
    seed: int
    log_interval: int
    threads: int | None
    deterministic: bool
    exit_interval: int | None
    timeout_minutes: float
    nonfinite: str
    audit: Literal['stop', 'warn']

TrainField: TypeAlias = SectionField[TrainSection, TrainSettings | TrainSection]

class DataSettings(TypedDict, total=False):
    """Keys of `data`."""

    corpus: str | list[str]
    weights: list[float] | None
    valid: str | list[str] | None
    tokenizer: str
    end_of_text: str | int | None
    vocab_divisible_by: int
    seq_length: int | None
    split: str
    cache_dir: str | None
    json_key: str

class DataSection(Section):
    """`ConfigContainer.data`."""

    corpus: str | list[str]
    weights: list[float] | None
    valid: str | list[str] | None
    tokenizer: str
    end_of_text: str | int | None
    vocab_divisible_by: int
    seq_length: int | None
    split: str
    cache_dir: str | None
    json_key: str

DataField: TypeAlias = SectionField[DataSection, DataSettings | DataSection]

class CheckpointSettings(TypedDict, total=False):
    """Keys of `checkpoint`."""

    save: str | None
    load: str | None
    save_interval: int | None
    keep_last: int | None
    keep_every: int | None
    async_save: bool
    accept: str | None
    reset_optimizer: bool
    pretrained_checkpoint: str | None

class CheckpointSection(Section):
    """`ConfigContainer.checkpoint`."""

    save: str | None
    load: str | None
    save_interval: int | None
    keep_last: int | None
    keep_every: int | None
    async_save: bool
    accept: str | None
    reset_optimizer: bool
    pretrained_checkpoint: str | None

CheckpointField: TypeAlias = SectionField[CheckpointSection, CheckpointSettings | CheckpointSection]

class LoggerSettings(TypedDict, total=False):
    """Keys of `logger`."""

    log_dir: str | None
    tensorboard: bool
    trackers: list[Literal['tensorboard', 'wandb', 'mlflow', 'jsonl']] | None
    project: str
    name: str | None
    wandb_mode: Literal['offline', 'online']
    mlflow_uri: str | None
    precision_every: int
    progress: bool

class LoggerSection(Section):
    """`ConfigContainer.logger`."""

    log_dir: str | None
    tensorboard: bool
    trackers: list[Literal['tensorboard', 'wandb', 'mlflow', 'jsonl']] | None
    project: str
    name: str | None
    wandb_mode: Literal['offline', 'online']
    mlflow_uri: str | None
    precision_every: int
    progress: bool

LoggerField: TypeAlias = SectionField[LoggerSection, LoggerSettings | LoggerSection]

class AuditSettings(TypedDict, total=False):
    """Keys of `audit`."""

    every: int | None

class AuditSection(Section):
    """`ConfigContainer.audit`."""

    every: int | None

AuditField: TypeAlias = SectionField[AuditSection, AuditSettings | AuditSection]
