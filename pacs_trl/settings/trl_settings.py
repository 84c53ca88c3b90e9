"""Settings of TRL and transformers: legal values that they do not check, settings that are refused, and settings that
only some losses read."""

from .fields import Range


# Settings that TRL accepts with illegal values, or rejects without naming them.
RANGES = {
    "per_device_train_batch_size": Range(least=1),
    "gradient_accumulation_steps": Range(least=1),
    "steps_per_generation": Range(least=1),
    "generation_batch_size": Range(least=1),
    "num_iterations": Range(least=1),
    "num_generations": Range(least=2),
    "max_completion_length": Range(least=1),
    "temperature": Range(above=0),
    "learning_rate": Range(least=0),
    "beta": Range(least=0),
    "epsilon": Range(above=0),
    "epsilon_high": Range(above=0),
    "max_grad_norm": Range(least=0),
    "weight_decay": Range(least=0),
    "adam_beta1": Range(least=0, below=1),
    "adam_beta2": Range(least=0, below=1),
    "adam_epsilon": Range(least=0),
    "warmup_steps": Range(least=0),
    "per_device_eval_batch_size": Range(least=1),
    "num_generations_eval": Range(least=1),
    "top_k": Range(least=0),
    "top_p": Range(above=0, most=1),
    "min_p": Range(least=0, most=1),
    "repetition_penalty": Range(above=0),
    "ref_model_mixup_alpha": Range(least=0, most=1),
    "ref_model_sync_steps": Range(least=1),
    "vllm_importance_sampling_clip_min": Range(least=0),
    "vllm_importance_sampling_clip_max": Range(above=0),
    "num_train_epochs": Range(above=0),
    "max_steps": Range(least=-1),
    "lora_r": Range(least=1),
    "lora_dropout": Range(least=0, below=1),
    "delta": Range(above=1),
    "top_entropy_quantile": Range(least=0, most=1),
    "router_aux_loss_coef": Range(least=0),
    "entropy_coef": Range(least=0),
    "entropy_coef_min": Range(least=0),
    "entropy_coef_max": Range(least=0),
    "entropy_coef_delta": Range(least=0),
    "entropy_target": Range(least=0),
    "off_policy_mask_threshold": Range(least=0),
    "sapo_temperature_neg": Range(above=0),
    "sapo_temperature_pos": Range(above=0),
    "vespo_k_neg": Range(least=0),
    "vespo_k_pos": Range(least=0),
    "vespo_lambda_neg": Range(least=0),
    "vespo_lambda_pos": Range(least=0),
}
# Settings with a choice that TRL checks after generation, or not at all.
CHOICES = {
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# Names of dtypes in which TRL loads weights.
DTYPES = ("auto", "bfloat16", "float16", "float32")
TURNED_OFF_BY_0 = ("max_grad_norm", "top_k")

# Settings that are refused unless they have their default value, and what they would do.
REFUSED = {
    "label_smoothing_factor": "would be ignored, because the loss has no target labels",
    "neftune_noise_alpha": (
        "would compute log-probs of another model than the one that generates, with noise on its embeddings"
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name"),
        "would be ignored, because a generation batch has whole groups in the order of shuffle_dataset",
    ),
    "data_seed": "would be ignored, because the order of prompts depends on seed",
    "average_tokens_across_devices": "would be ignored, because the loss is normalized over all processes",
    **dict.fromkeys(
        (
            "include_for_metrics",
            "batch_eval_metrics",
            "prediction_loss_only",
            "label_names",
            "eval_do_concat_batches",
            "eval_accumulation_steps",
            "eval_use_gather_object",
        ),
        "would be ignored, because an evaluation has rewards instead of predictions",
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "would round the trained weights in an evaluation",
    ),
    "hub_always_push": "would be ignored, because models are pushed at the end of training",
    "enable_jit_checkpoint": (
        "may save inside an optimizer step; `pacs-trl train` and pacs_trl.rollouts.stop_on_signal.StopOnSignal() "
        "save between two"
    ),
}

# Sizes of accelerate's `ParallelismConfig` that are refused above 1. Those of data parallelism are legal.
SPLITTING_SIZES = ("tp_size", "cp_size", "sp_size")

# Settings that would be ignored without another one.
NEEDS = {
    "vllm_structured_outputs_regex": "use_vllm",
    "transformers_continuous_batching_config": "use_transformers_continuous_batching",
    "ref_model_mixup_alpha": "sync_ref_model",
    "ref_model_sync_steps": "sync_ref_model",
    "num_completions_to_print": "log_completions",
    "log_unique_prompts": "log_completions",
    "liger_kernel_config": "use_liger_kernel",
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), "use_adaptive_entropy"
    ),
}

# Settings without effect while another one, the switch, has a value. Users keep them beside a switch that is off, so
# they are warned of.
WITHOUT_EFFECT = {
    ("use_peft", False): (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
    ),
    ("load_in_4bit", False): ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"),
    ("use_vllm", False): (
        *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size"),
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        *("vllm_max_model_length", "vllm_gpu_memory_utilization"),
    ),
    ("vllm_mode", "colocate"): (
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    ),
    ("vllm_mode", "server"): (
        *("vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_model_impl"),
    ),
    ("vllm_importance_sampling_correction", False): (
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    ),
    ("gradient_checkpointing", False): ("gradient_checkpointing_kwargs",),
    ("save_strategy", "no"): ("save_steps", "save_total_limit", "save_only_model"),
    ("eval_strategy", "no"): ("eval_steps", "eval_delay", "per_device_eval_batch_size", "num_generations_eval"),
    ("logging_strategy", "no"): ("logging_steps", "logging_first_step"),
    ("push_to_hub", False): ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision"),
}

# Settings of GRPOConfig that only shape GRPO's loss, and those of the SAPO and VESPO losses among them.
SAPO_AND_VESPO_SETTINGS = (
    *("sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
GRPO_LOSS_SETTINGS = (
    *("delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "scale_rewards"),
    *("multi_objective_aggregation", "top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl"),
    *SAPO_AND_VESPO_SETTINGS,
)
