"""The arguments of vLLM 0.22's LLM and EngineArgs that are not built here, each with the default it has there.

A caller may pass such an argument with its default; any other value is refused by name, never ignored.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

_PARALLEL = {
    "distributed_executor_backend": None,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "dcp_comm_backend": "ag_rs",
    "dcp_kv_cache_interleave_size": 1,
    "cp_kv_cache_interleave_size": 1,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "nnodes": 1,
    "node_rank": 0,
    "data_parallel_size": 1,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_size_local": None,
    "data_parallel_address": None,
    "data_parallel_rpc_port": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
    "data_parallel_backend": "mp",
    "enable_expert_parallel": False,
    "enable_ep_weight_filter": False,
    "all2all_backend": "allgather_reducescatter",
    "enable_elastic_ep": False,
    "enable_dbo": False,
    "ubatch_size": 0,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "disable_nccl_for_dp_synchronization": None,
    "eplb_config": None,
    "enable_eplb": False,
    "expert_placement_strategy": "linear",
    "max_parallel_loading_workers": None,
    "ray_workers_use_nsight": False,
    "disable_custom_all_reduce": False,
    "worker_cls": "auto",
    "worker_extension_cls": "",
}
_MODEL = {
    "task": "auto",
    "runner": "auto",
    "convert": "auto",
    "model_weights": "",
    "hf_config_path": None,
    "config_format": "auto",
    "code_revision": None,
    "trust_remote_code": False,
    "hf_token": None,
    "model_impl": "auto",
    "served_model_name": None,
    "enable_prompt_embeds": False,
    "enable_return_routed_experts": False,
    "quantization": None,
    "allow_deprecated_quantization": False,
    "quantization_config": None,
    "rope_scaling": None,
    "rope_theta": None,
    "hf_overrides": None,
    "disable_sliding_window": False,
    "disable_cascade_attn": False,
    "override_attention_dtype": None,
    "pooler_config": None,
    "override_pooler_config": None,
    "enforce_eager": False,
    "safetensors_load_strategy": None,
    "safetensors_prefetch_num_threads": None,
    "safetensors_prefetch_block_size": None,
    "model_loader_extra_config": None,
    "ignore_patterns": None,
    "use_tqdm_on_load": True,
    "pt_load_map_location": "cpu",
    "cpu_offload_gb": 0,
    "cpu_offload_params": None,
    "offload_backend": "auto",
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "weight_transfer_config": None,
    "enable_sleep_mode": False,
    "io_processor_plugin": None,
    "renderer_num_workers": 1,
}
_CACHE = {
    "kv_cache_dtype_skip_layers": None,
    "calculate_kv_scales": False,
    "prefix_caching_hash_algo": "sha256",
    "swap_space": 4,
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_block_size": None,
    "mamba_cache_mode": "none",
    "mamba_backend": "triton",
    "kv_sharing_fast_prefill": False,
    "kv_transfer_config": None,
    "kv_events_config": None,
    "ec_transfer_config": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": "native",
    "disable_hybrid_kv_cache_manager": None,
}
_SCHEDULING = {
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "scheduler_cls": None,
    "stream_interval": 1,
    "speculative_config": None,
    "num_lookahead_slots": 0,
    "disable_async_output_proc": False,
}
_COMPILATION = {
    "compilation_config": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "max_seq_len_to_capture": 8192,
    "attention_config": None,
    "kernel_config": None,
    "moe_backend": "auto",
    "linear_backend": "auto",
    "optimization_level": None,
    "performance_mode": "balanced",
    "additional_config": None,
}
_SAMPLING_AND_TEXT = {
    "logprobs_mode": "raw_logprobs",
    "logits_processor_pattern": None,
    "structured_outputs_config": None,
    "guided_decoding_backend": None,
    "reasoning_parser": "",
    "reasoning_parser_plugin": None,
    "tokens_only": False,
}
_MULTIMODAL = {
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "language_model_only": False,
    "limit_mm_per_prompt": None,
    "enable_mm_embeds": False,
    "interleave_mm_strings": False,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_only": False,
    "mm_encoder_tp_mode": "weights",
    "mm_encoder_attn_backend": None,
    "mm_tensor_ipc": "direct_rpc",
    "skip_mm_profiling": False,
    "video_pruning_rate": None,
    "disable_chunked_mm_input": False,
}
_LORA = {
    "enable_lora": False,
    "enable_lora_bias": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "default_mm_loras": None,
    "fully_sharded_loras": False,
    "max_cpu_loras": None,
    "lora_dtype": "auto",
    "lora_target_modules": None,
    "enable_tower_connector_lora": False,
    "specialize_active_lora": False,
}
_OBSERVABILITY = {
    "aggregate_engine_logging": False,
    "show_hidden_metrics_for_version": None,
    "otlp_traces_endpoint": None,
    "collect_detailed_traces": None,
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": 0.01,
    "cudagraph_metrics": False,
    "enable_layerwise_nvtx_tracing": False,
    "enable_mfu_metrics": False,
    "enable_mm_processor_stats": False,
    "enable_logging_iteration_details": False,
    "enable_log_requests": False,
    "profiler_config": None,
    "shutdown_timeout": 0,
    "fail_on_environ_validation": False,
}

NOT_BUILT: Mapping[str, Any] = MappingProxyType(
    _PARALLEL | _MODEL | _CACHE | _SCHEDULING | _COMPILATION | _SAMPLING_AND_TEXT | _MULTIMODAL | _LORA | _OBSERVABILITY
)


def reject_not_built(name: str, value: Any) -> None:
    """Refuse an argument of vLLM that is not built here, unless it asks for what vLLM does by default.

    Raises: NotImplementedError naming the argument, the value and the default.
    """
    default = NOT_BUILT[name]
    is_empty = default is None and isinstance(value, dict | list | str) and not value
    if value != default and not is_empty:
        raise NotImplementedError(
            f"{name}={value!r} is not supported: only vLLM's default, {name}={default!r}, is. Leave it out."
        )


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """The message for an argument that neither vLLM nor `known` has."""
    close = difflib.get_close_matches(name, [*known, *NOT_BUILT], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"EngineArgs got an unexpected argument {name!r}.{hint}"
