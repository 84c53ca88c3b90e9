"""What transformers and TRL refuse between settings of a run, as values and all at once.

Their configurations say it too, but stop at the first mistake and can only be made where the run is: they count the
processes that are there and ask this machine's GPU for bfloat16. What depends on the machine of the run is left to
them. `tests/test_trl_drift.py` notices when their rules change.
"""

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_torch_bf16_gpu_available

from .trainer_checks import check_evaluation_batch, check_generation_kwargs


def trainer_errors(given: Any, num_processes: int | None) -> list[str]:
    """
    What is wrong between the settings of a trainer, whatever the method.

    Args:
        given (`Any`):
            Values of the fields of `GRPOConfig`, legal each on its own.
        num_processes (`int`, *optional*):
            Number of processes of the run, if it is known.

    Returns:
        `list[str]`: a sentence for each mistake.
    """
    evaluates = given.eval_strategy != "no"
    low, high = given.vllm_importance_sampling_clip_min, given.vllm_importance_sampling_clip_max
    mode = given.vllm_importance_sampling_mode
    rules = [
        (
            given.fp16 and given.bf16,
            "fp16 and bf16 are both true, and a run has one precision. Remove one of them.",
        ),
        (
            given.fp16_full_eval and given.bf16_full_eval,
            "fp16_full_eval and bf16_full_eval are both true, and an evaluation has one precision. Remove one of "
            "them.",
        ),
        (
            given.auto_find_batch_size,
            "auto_find_batch_size=True would lower the batch until it no longer holds whole groups of num_generations "
            "completions. Remove the key, and lower per_device_train_batch_size.",
        ),
        (
            given.log_completions_hub_repo is not None and not given.log_completions,
            f"log_completions_hub_repo={given.log_completions_hub_repo!r} would stay empty, because log_completions "
            "is false. Set it to true, or remove the repository.",
        ),
        (
            given.dataloader_prefetch_factor is not None and given.dataloader_num_workers == 0,
            f"dataloader_prefetch_factor={given.dataloader_prefetch_factor} would be ignored with "
            "dataloader_num_workers=0: "
            "batches are loaded when they are needed. Raise dataloader_num_workers, or remove the key.",
        ),
        (
            given.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") and not evaluates,
            f"lr_scheduler_type={given.lr_scheduler_type!s} goes by the results of evaluations, and eval_strategy is "
            "'no'. Set eval_strategy, or choose another schedule.",
        ),
        (
            low is not None and high is not None and low >= high,
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}: ratios "
            "are kept between them.",
        ),
        (
            given.vllm_importance_sampling_correction and mode.endswith("_truncate") and low is None and high is None,
            f"vllm_importance_sampling_mode={mode!r} has nothing to truncate at. Set "
            "vllm_importance_sampling_clip_min or vllm_importance_sampling_clip_max.",
        ),
        (
            isinstance(given.pad_to_multiple_of, str) and not _is_multiple(given.pad_to_multiple_of),
            f"pad_to_multiple_of must be a whole number, 'auto' or 'none', got {given.pad_to_multiple_of!r}.",
        ),
        (
            given.optim_args is not None and str(given.optim) in ("adamw_torch", "adamw_torch_fused"),
            f"optim_args={given.optim_args!r} would be ignored: optim={given.optim!s} takes adam_beta1, adam_beta2, "
            "adam_epsilon and weight_decay. Set those, or choose another optimizer.",
        ),
        (
            given.lr_scheduler_type == "constant" and given.warmup_steps,
            f"warmup_steps={given.warmup_steps} would be ignored with lr_scheduler_type='constant'. Set "
            "constant_with_warmup, or remove the key.",
        ),
        (
            given.sync_ref_model and given.beta == 0,
            "sync_ref_model=True needs a reference model, and beta=0 has none. Set beta, or remove the key.",
        ),
        (
            given.eval_steps is not None and not evaluates,
            f"eval_steps={given.eval_steps} would be ignored, because eval_strategy is 'no'. Set eval_strategy: "
            "steps.",
        ),
        (
            given.liger_kernel_config is not None and not given.use_liger_kernel,
            "liger_kernel_config would be ignored, because use_liger_kernel is false. Remove it.",
        ),
        (
            given.fsdp_config is not None and not given.fsdp,
            "fsdp_config would be ignored, because fsdp is not set. Set fsdp, or describe FSDP in the file that "
            "accelerate launches with.",
        ),
        (
            bool(unknown := (given.gradient_checkpointing_kwargs or {}).keys() - signature(checkpoint).parameters),
            f"gradient_checkpointing_kwargs has {', '.join(sorted(unknown))}, which torch.utils.checkpoint.checkpoint "
            "does not take. Remove it.",
        ),
        *_interval_rules(given),
        *_best_model_rules(given),
    ]
    errors = [message for broken, message in rules if broken] + _object_errors(given)
    checks = [partial(check_generation_kwargs, given)]
    if evaluates and num_processes is not None:
        generations = given.num_generations_eval or given.num_generations
        checks.append(partial(check_evaluation_batch, given.per_device_eval_batch_size, num_processes, generations))
    for check in checks:
        try:
            check()
        except ValueError as error:
            errors.append(str(error))
    return errors


def precision_error(given: Any) -> str | None:
    """Why this machine cannot compute in the precision of a run, in words; `None` if it can."""
    asked = [name for name in ("bf16", "bf16_full_eval") if getattr(given, name)]
    if not asked or given.use_cpu or is_torch_bf16_gpu_available():
        return None
    return (
        f"{' and '.join(asked)} needs a GPU that computes in bfloat16, and this machine has none. Train on another "
        "machine, or set bf16: false (without a GPU also use_cpu: true)."
    )


def _is_multiple(text: str) -> bool:
    return text.lower() in ("auto", "none", "null") or text.strip().isdecimal()


def _interval_rules(given: Any) -> list[tuple[bool, str]]:
    """Intervals below 1 are shares of the run; above it they count steps."""
    rules = []
    for what in ("logging", "eval", "save"):
        steps = getattr(given, f"{what}_steps")
        counted = getattr(given, f"{what}_strategy") == "steps" and steps is not None and steps > 1
        message = f"{what}_steps={steps} must be a whole number above 1: it counts optimizer steps."
        rules.append((counted and steps != int(steps), message))
    return rules


def _best_model_rules(given: Any) -> list[tuple[bool, str]]:
    wants_best = given.load_best_model_at_end and given.save_strategy != "best"
    save, evaluation = given.save_steps, given.eval_steps or given.logging_steps
    multiple = (save < 1) == (evaluation < 1) and round(save * 1e6) % max(1, round(evaluation * 1e6)) == 0
    return [
        (
            wants_best and given.save_strategy != given.eval_strategy,
            f"load_best_model_at_end=True needs an evaluation of each checkpoint, but save_strategy is "
            f"{given.save_strategy!s} and eval_strategy is {given.eval_strategy!s}. Set both to the same.",
        ),
        (
            wants_best and given.save_strategy == given.eval_strategy == "steps" and not multiple,
            f"load_best_model_at_end=True needs an evaluation of each checkpoint, so save_steps={save} must be a "
            f"multiple of eval_steps={evaluation}.",
        ),
    ]


def _object_errors(given: Any) -> list[str]:
    """Settings that become objects of the libraries."""
    errors = []
    for name in ("accelerator_config", "fsdp_config", "deepspeed"):
        file = getattr(given, name)
        if isinstance(file, str) and not Path(file).is_file():
            errors.append(f"{name}: the file {file!r} does not exist (seen from {Path.cwd()}).")
    config = given.accelerator_config
    try:
        if isinstance(config, dict):
            AcceleratorConfig(**config)
        elif config is not None and Path(config).is_file():
            AcceleratorConfig.from_json_file(config)
    except (TypeError, ValueError) as error:  # how they refuse keys they do not know
        errors.append(f"accelerator_config={config!r} is refused: {error}.")
    known = [option.value for option in DebugOption]
    words = given.debug.split() if isinstance(given.debug, str) else []
    if unknown := [word for word in words if word not in known]:
        errors.append(f"debug must be some of {', '.join(known)}; got {', '.join(unknown)}.")
    return errors
