"""PACSTrainer overrides private methods of TRL and transformers. This file says what it relies on.

When it fails after an upgrade, read the named method, adapt `pacs_trainer.py` or what is in `rollouts/` where needed,
then change the expectation here.
"""

import ast
import hashlib
import inspect
import textwrap
from dataclasses import fields
from typing import get_type_hints

import pytest
from transformers import GenerationConfig, Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler

from pacs_trl import PACSConfig
from pacs_trl.methods import method_names
from pacs_trl.recipe import trainer_of_method
from pacs_trl.rollouts.generation_keys import _KEYS, refused_keys
from pacs_trl.rollouts.rollout_worker import RolloutLoop
from pacs_trl.rollouts.weight_transfer import SharedMemoryTransfer
from pacs_trl.settings.trl_settings import GRPO_LOSS_SETTINGS, REFUSED


TRAINERS = {method: trainer_of_method(method) for method in method_names()}
CLASSES = {
    base for trainer in TRAINERS.values() for base in trainer.__mro__ if base.__module__.startswith("pacs_trl.")
}
OVERRIDES = {
    f"{base.__module__.removeprefix('pacs_trl.')}.{base.__name__}.{name}": (name, method)
    for base in sorted(CLASSES, key=lambda base: (base.__module__, base.__name__))
    for name, method in vars(base).items()
    if inspect.isfunction(method) and hasattr(GRPOTrainer, name) and name != "__init__"
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_have_the_parameters_of_trl(override):
    """All of them, or the first ones and `*args, **kwargs`."""
    name, method = OVERRIDES[override]
    theirs = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    ours = inspect.signature(method).parameters.values()
    named = [parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    theirs = [parameter for parameter in theirs if parameter != "private"]  # new in push_to_hub of 5.18
    if name == "_init_training_state":  # by position
        assert len(named) == len(theirs)
    else:
        assert named == (theirs[: len(named)] if len(named) < len(ours) else theirs)


@pytest.mark.parametrize("method", TRAINERS)
def test_the_trainers_take_the_arguments_of_trl(method):
    """By name, with their types and defaults; of `args` each trainer has its own type."""
    trainer = TRAINERS[method]
    theirs, ours = (dict(inspect.signature(t.__init__).parameters) for t in (GRPOTrainer, trainer))
    names = GRPOTrainer.__init__.__globals__ | trainer.__init__.__globals__  # what forward references mean
    their_types, our_types = (get_type_hints(t.__init__, names) for t in (GRPOTrainer, trainer))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    assert our_types | {"args": None} == their_types | {"args": None}


def tree(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


# Written anew or copied in part, so that any change of theirs may have to be repeated: the hashes, from the oldest
# version on (Python 3.13 writes some code differently), and where.
REPEATED = {
    (GRPOTrainer, "training_step"): ("96c13325", "ExactUpdateTrainer.training_step"),
    (GRPOTrainer, "_prepare_inputs"): ("b6f38f7a", "ExactUpdateTrainer._prepare_inputs"),
    # from 5.19 on it asks `loss_is_scaled_for_ga` before it divides the loss, which ours never does
    (Trainer, "training_step"): ("30049257 c0c9c88c", "ExactUpdateTrainer.training_step"),
    (GRPOTrainer, "_compute_loss"): (
        "6b861df6",
        "PPOTrainer._train_critic, and whether a mask or weight is new that every loss has to respect",
    ),
    (GRPOTrainer, "_generate_and_score_completions"): (
        "739def7d",
        "unpad_rollouts: a new key of `output` may be a mask or a weight that every loss has to respect",
    ),
    (GRPOTrainer, "__init__"): ("aebed526", "RolloutTrainer, which replaces attributes set here, and kl_reference"),
    (GRPOTrainer, "_tool_call_loop"): (
        "ba4ef3a6 dfc4c23c",
        "ConversationEngine of pacs_trl.evaluation, which has its rules",
    ),
    (_AsyncRolloutLoop, "_generate_loop"): ("8b413c9c", "RolloutLoop: groups that wait, and ContinuousRollouts.take"),
    (_AsyncRolloutLoop, "_score_loop"): ("91fb41de", "RolloutLoop._score_loop, which runs it several times"),
    (_AsyncRolloutLoop, "_score_group"): ("7563d072", "RolloutLoop._score_group"),
    (_AsyncRolloutLoop, "_generate_one"): ("38df5c16", "RolloutLoop._generate_one"),
    (_AsyncRolloutLoop, "_generate_one_turn"): (
        "8137dd02",
        "RolloutLoop._generate_one_turn, _post",
    ),
    (_AsyncRolloutLoop, "_run_loops"): ("f66f5921", "RolloutLoop._run_loops"),
    (_AsyncRolloutLoop, "_repeat_iterator"): ("6f350444", "RolloutLoop._repeat_iterator"),
    (_AsyncRolloutLoop, "_post"): ("a99e5999", "RolloutLoop._post"),
    (_AsyncRolloutLoop, "_retry"): ("dc5123f4", "RolloutLoop._retry"),
    (_AsyncRolloutLoop, "__init__"): ("769f3a6c", "RolloutLoop.__init__, which reads what is set here"),
    (AsyncRolloutWorker, "__init__"): ("9147b862", "RolloutWorker.__init__, which replaces the shared version"),
    (AsyncRolloutWorker, "start"): ("95f4f826", "RolloutWorker.start"),
    (AsyncRolloutWorker, "stop"): ("e717146e", "RolloutWorker.stop"),
    (VLLMGeneration, "generate"): (
        "f902129a",
        "Engine.generate (what the other processes wait for), SeededLLM.generate",
    ),
}


@pytest.mark.parametrize(("owner", "name"), REPEATED, ids=lambda value: getattr(value, "__name__", value))
def test_repeated_methods_have_not_changed(owner, name):
    """Comments and layout may change, code may not."""
    expected, ours = REPEATED[owner, name]
    digest = hashlib.sha256(ast.unparse(tree(vars(owner)[name])).encode()).hexdigest()[:8]
    assert digest in expected.split(), f"{owner.__name__}.{name} has changed (now {digest}). Compare it with {ours}."


# Settings of GRPOConfig that keep their meaning under PACS. All others are refused.
KEPT = set(
    """
    model_init_kwargs trust_remote_code disable_dropout cast_lm_head_to_fp32 num_generations num_generations_eval
    max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size
    steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
    cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations reward_weights
    mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min log_completions log_multimodal num_completions_to_print log_unique_prompts
    log_completions_hub_repo use_transformers_continuous_batching transformers_continuous_batching_config
    use_transformers_paged vllm_importance_sampling_cap entropy_coef use_adaptive_entropy entropy_coef_min
    entropy_coef_max entropy_coef_delta entropy_target router_aux_loss_coef
    """.split()
)


def test_every_setting_of_grpo_is_kept_or_refused():
    settings = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(TrainingArguments)}
    refused = set(GRPO_LOSS_SETTINGS)
    assert not KEPT & refused
    assert settings == KEPT | refused, (
        f"new: {sorted(settings - KEPT - refused)}, gone: {sorted((KEPT | refused) - settings)}. A new setting is "
        "either kept or, if only GRPO's loss reads it, refused in pacs_config.py."
    )


# Settings of TrainingArguments that keep their meaning in every trainer. All others are refused in trl_settings.py.
USED = set(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
    liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm report_to
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
    per_device_eval_batch_size eval_on_start save_only_model save_strategy save_steps save_on_each_node
    save_total_limit push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip include_num_input_tokens_seen
    restore_callback_states_from_checkpoint full_determinism seed use_cpu accelerator_config parallelism_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp
    fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    """.split()
)


def test_every_setting_of_the_trainer_is_used_or_refused():
    settings, refused = {f.name for f in fields(TrainingArguments)}, set(REFUSED)
    assert not USED & refused
    assert settings <= USED | refused, (
        f"new: {sorted(settings - USED - refused)}. A new setting is used or refused in trl_settings.py."
    )


def test_every_key_of_generation_is_classified():
    groups = [_KEYS["settings"], refused_keys("transformers")]
    groups += [_KEYS["transformers"][name] for name in ("allowed", "reshape_policy")]
    classified = [key for group in groups for key in group]
    assert len(set(classified)) == len(classified)
    assert set(vars(GenerationConfig())) <= set(classified), (
        f"new: {sorted(set(vars(GenerationConfig())) - set(classified))}. Say in generation_keys.yaml what a new key "
        "changes."
    )


def test_settings_of_pacs_have_no_name_of_a_setting_of_trl():
    added = set(PACSConfig.__annotations__) - {"disable_dropout", "vllm_importance_sampling_correction"}
    assert not added & {f.name for f in fields(GRPOConfig)}


def calls(function) -> list[str]:
    nodes = [node for node in ast.walk(tree(function)) if isinstance(node, ast.Call)]
    return [node.func.attr for node in sorted(nodes, key=lambda n: n.lineno) if isinstance(node.func, ast.Attribute)]


def test_trainer_still_calls_the_hooks():
    saving = calls(Trainer._save_checkpoint)
    assert {"_save_rng_state", "save_model", "_save_optimizer_and_scheduler"} <= set(saving)
    assert saving.index("_save_rng_state") < saving.index("save_to_json"), (
        "trainer_state.json says that a checkpoint is complete, so it must be written last"
    )
    beginning = calls(Trainer._inner_training_loop)
    assert (
        beginning.index("_init_training_state")
        < beginning.index("_prepare_for_training")
        < beginning.index("_evaluate")
        < beginning.index("_run_epoch")
    ), "a checkpoint is loaded before the evaluation at the start"
    assert "get_eval_dataloader" in calls(Trainer.evaluate)
    epoch = calls(Trainer._run_epoch)
    for name in ("training_step", "_get_grad_norm"):
        assert name in epoch, f"Trainer._run_epoch no longer calls {name}"
    assert (
        epoch.index("training_step") < epoch.index("_get_grad_norm") < epoch.index("step") < epoch.index("zero_grad")
    ), "a step whose gradient is not finite is skipped between the gradient norm and the optimizer step"
    assert "_calculate_rewards" in calls(GRPOTrainer._generate_and_score_completions)
    assert "_generate_single_turn" in calls(GRPOTrainer._generate)


def test_the_rollout_loop_overrides_methods_of_trl():
    added = {"_takes_seed", "_stream", "_acknowledge", "_read_all", "_checked", "_grade"}
    for name, method in vars(RolloutLoop).items():
        if inspect.isfunction(method) and name != "__init__" and name not in added:
            theirs = inspect.signature(vars(_AsyncRolloutLoop)[name]).parameters
            assert [*inspect.signature(method).parameters] == [*theirs], name


def test_transfers_of_weights_follow_the_protocol_of_trl():
    for name in [name for name in vars(WeightTransferProtocol) if not name.startswith("_")]:
        assert callable(getattr(SharedMemoryTransfer, name)), name


def test_the_sampler_keeps_the_attributes_that_resuming_reads():
    sampler = RepeatSampler([1, 2], mini_repeat_count=1, shuffle=True, seed=3)
    assert (sampler.shuffle, sampler.seed) == (True, 3) and sampler.generator.initial_seed() == 3
