"""Scenarios of `equality.py`: `python equality_scenarios.py INPUTS OUTPUT [NAME ...]`, with a package on PYTHONPATH.

Each scenario writes to OUTPUT/NAME: trained weights to `weights/`, logged numbers to `metrics.json`, and files that
must be equal byte for byte to `files/`. Models and problems are files of INPUTS (`equality_inputs.py`). A training run
is a recipe for the command `pacs_trl.train`; only runs that are stopped on purpose use the trainers that `pacs_trl`
exports. Nothing else of the package is imported, so that this file runs with the package of other commits.
"""

import functools
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

import pacs_trl


MAX_COMPLETION_LENGTH = 16
NO_VERDICT_BELOW = 0.15


# What recipes name: reward functions, rollout functions, a tool, and an environment. ------------------------------


def _number(completion_ids: list[int]) -> float:
    """Return a number in [0, 1) that depends on every token."""
    return int.from_bytes(hashlib.sha256(str(list(completion_ids)).encode()).digest()[:6]) / 2**48


def hard_label(completion_ids, **kwargs) -> list[float]:
    return [float(_number(ids) < 0.5) for ids in completion_ids]


def rare_label(completion_ids, **kwargs) -> list[float]:
    return [float(_number(ids) < 0.2) for ids in completion_ids]


def soft_label(completion_ids, **kwargs) -> list[float]:
    return [_number(ids) for ids in completion_ids]


def label_or_none(completion_ids, **kwargs) -> list[float | None]:
    numbers = [_number(ids) for ids in completion_ids]
    return [None if number < NO_VERDICT_BELOW else float(number < 0.5) for number in numbers]


def labels_of_steps(completion_ids, **kwargs) -> list[list[tuple[int, float]] | None]:
    """Return up to three labels per completion, the last one for the outcome; `None` for some."""
    labels: list[list[tuple[int, float]] | None] = []
    for ids in completion_ids:
        ends = sorted({len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1})
        pairs = [(end, float(_number(ids[: end + 1]) < 0.5)) for end in ends]
        labels.append(None if _number(ids) < NO_VERDICT_BELOW else pairs)
    return labels


def random_rollouts(prompts, trainer) -> dict:
    """Rollout function: completions depend only on the step and the position in the generation."""
    tokenizer = trainer.processing_class
    first = trainer.accelerator.process_index * len(prompts)
    completions, logprobs, masks = [], [], []
    for position in range(first, first + len(prompts)):
        rng = np.random.default_rng([trainer.state.global_step, position])
        ids = rng.integers(0, 256, size=rng.integers(1, MAX_COMPLETION_LENGTH)).tolist()
        if rng.random() < 0.75:
            ids.append(tokenizer.eos_token_id)
        completions.append(ids)
        logprobs.append(rng.uniform(-8.0, -3.0, len(ids)).tolist())
        masks.append((rng.random(len(ids)) < 0.7).astype(int).tolist())
    prompt_ids = [tokenizer(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}


def plain_rollouts(prompts, trainer) -> dict:
    """Random completions without log-probs of an engine, and without tool results."""
    rollouts = random_rollouts(prompts, trainer)
    return {"prompt_ids": rollouts["prompt_ids"], "completion_ids": rollouts["completion_ids"], "logprobs": None}


def rollouts_with_logprobs(prompts, trainer) -> dict:
    rollouts = random_rollouts(prompts, trainer)
    del rollouts["env_mask"]
    return rollouts


def rollouts_with_tools(prompts, trainer) -> dict:
    return random_rollouts(prompts, trainer) | {"logprobs": None}


async def late_rollouts(prompts, generate) -> dict:
    """Asynchronous rollout function: the second turn continues the first one after a tool result."""
    prompt_ids = [list(b"%d + 1?" % i) for i in range(len(prompts))]
    first = await generate(prompt_ids)
    tool_result = list(b"ok")
    longer = [
        [*prompt, *completion, *tool_result]
        for prompt, completion in zip(prompt_ids, first["completion_ids"], strict=True)
    ]
    second = await generate(longer)
    turns = list(zip(first["completion_ids"], second["completion_ids"], strict=True))
    logps = zip(first["logprobs"], second["logprobs"], strict=True)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[*one, *tool_result, *two] for one, two in turns],
        "logprobs": [[*one, *([0.0] * len(tool_result)), *two] for one, two in logps],
        "env_mask": [[1] * len(one) + [0] * len(tool_result) + [1] * len(two) for one, two in turns],
    }


def t(x: str) -> str:
    """
    Return the successor of a digit.

    Args:
        x: The digit.

    Returns:
        The next number.
    """
    return str(int(x[:1]) + 1)


class Successors:
    """Environment that asks for a number and has the tool `t`."""

    def reset(self, seed: int = 0, **columns) -> str:
        self.number = 3 + seed % 2
        return f"{self.number}?"

    def t(self, x: str) -> str:
        """
        Return the successor of a digit.

        Args:
            x: The digit.

        Returns:
            The next number.
        """
        return str(int(x[:1]) + self.number)


def environment_reward(completions, environments, completion_ids, **columns) -> list[float]:
    return [float(_number([each.number, *ids]) < 0.5) for each, ids in zip(environments, completion_ids, strict=True)]


class Environment:
    train_dataset = None
    environment_factory = Successors
    reward_funcs = [environment_reward]


environment = Environment()


# Recipes ------------------------------------------------------------------------------------------------------------

# Optimizer steps of 4 prompts x 4 completions, two for each generation: the first has all proxies at 0, the second has
# not.
COMMON: dict[str, Any] = {
    "method": "pacs",
    "prompt_instruction": "",
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_steps": 4,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
PLAIN = {"reward_funcs": ["hard_label"], "rollout_func": "plain_rollouts"}
TOOLS = {"reward_funcs": ["label_or_none"], "rollout_func": "rollouts_with_tools"}
REPORTED = {"reward_funcs": ["hard_label"], "rollout_func": "rollouts_with_logprobs"}
GENERATED = {"reward_funcs": ["math_reward"]}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}
# 3 prompts, whose groups lie in two batches.
STRADDLING = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
TWO_MINIBATCHES = {"steps_per_generation": 4}
ONE_UPDATE = {"num_iterations": 1}
CORRECTED = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
SNAPSHOT = ADAMW | {
    "reference": "snapshot",
    "reference_reset_steps": 3,
    "reset_optimizer_on_reference_reset": True,
}
EVALUATION = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "eval_split_size": 8,
    "eval_benchmarks": ["benchmark"],
    "eval_max_problems": 4,
    "eval_num_samples": 4,
    "per_device_eval_batch_size": 8,
}
LAG = GENERATED | TWO_MINIBATCHES | ONE_UPDATE | {"rollout_lag": 1, "max_steps": 6, "temperature": 1.3}

PACS: dict[str, dict[str, Any]] = {
    "rollout": PLAIN,
    "one_update": PLAIN | ONE_UPDATE,
    "adamw": PLAIN | ADAMW | TWO_MINIBATCHES | {"max_grad_norm": 0.5},
    "weight_decay_schedule": PLAIN | ADAMW | {"weight_decay": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2},
    "snapshot": PLAIN | SNAPSHOT,
    "snapshot_offload": PLAIN | ADAMW | {"reference": "snapshot", "reference_offload": True},
    "snapshot_split": PLAIN | SNAPSHOT | STRADDLING | {"group_layout": "split"},
    "lora": PLAIN | LORA,
    "lora_kl": PLAIN | LORA | {"beta": 0.1},
    "lora_snapshot": PLAIN | LORA | SNAPSHOT,
    "whole": PLAIN | {"group_layout": "whole"},
    "split": PLAIN | STRADDLING | {"group_layout": "split"},
    "split_tokens": PLAIN | {"group_layout": "split", "max_tokens_per_micro_batch": 80},
    "kl": PLAIN | {"beta": 0.1},
    "kl_snapshot": PLAIN | SNAPSHOT | {"beta": 0.1},
    "no_verdicts": TOOLS | {"mask_truncated_completions": True},
    "no_verdicts_split": TOOLS | STRADDLING | {"beta": 0.1, "group_layout": "split"},
    "soft_labels": PLAIN | {"reward_funcs": ["soft_label"], "score_estimator": "dr_grpo", "class_weighting": "none"},
    "grpo_score": PLAIN | {"score_estimator": "grpo", "first_update_score": "dr_grpo", "actor_term_coef": 1.0},
    "grpo_score_snapshot": PLAIN | SNAPSHOT | {"score_estimator": "grpo"},
    "no_score_estimator": PLAIN | {"score_estimator": "none", "pacs_beta": 0.5},
    "mean_logp": PLAIN | {"proxy": "mean_logp", "actor_term_coef": 0.5},
    "mean_log_ratio": PLAIN | {"proxy": "mean_log_ratio", "class_weighting": "only_positive"},
    "only_negative": PLAIN | {"class_weighting": "only_negative"},
    "token_weights": REPORTED | CORRECTED,
    "sequence_weights": REPORTED
    | CORRECTED
    | {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1e9},
    "token_weights_snapshot": REPORTED | CORRECTED | SNAPSHOT,
    "padded": PLAIN | {"padding_free": "never"},
    "padded_split": PLAIN | STRADDLING | {"padding_free": "never", "group_layout": "split"},
    "gradient_checkpointing": PLAIN | {"gradient_checkpointing": True},
    "several_batches_per_step": PLAIN
    | {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1},
    "generated": GENERATED,
    "generated_fast": GENERATED | LORA | {"fast_generation": True},
    "generated_bfloat16": GENERATED | {"generation_dtype": "bfloat16"},
    "weighted_rewards": {"reward_funcs": ["math_reward", "hard_label"], "reward_weights": [0.5, 0.5]},
    "tools": {"model_name_or_path": "calling", "reward_funcs": ["hard_label"], "tools": ["t"]}
    | {"max_completion_length": 32, "max_tool_calling_iterations": 2},
    "environment": {"model_name_or_path": "calling", "environment": "environment", "max_completion_length": 32},
    "evaluation": GENERATED | EVALUATION,
}
GRPO: dict[str, dict[str, Any]] = {
    f"grpo_{loss_type}": PLAIN | TWO_MINIBATCHES | {"loss_type": loss_type}
    for loss_type in ("grpo", "dr_grpo", "bnpo", "dapo", "luspo", "cispo", "sapo", "vespo")
}
GRPO["grpo_luspo"]["importance_sampling_level"] = "sequence"
GRPO |= {
    "grpo_one_update": PLAIN | ONE_UPDATE,
    "grpo_adamw_lora": PLAIN | ADAMW | LORA | {"beta": 0.1},
    "grpo_kl": PLAIN | {"beta": 0.1},
    "grpo_kl_without_correction": PLAIN | {"beta": 0.1, "use_bias_correction_kl": False},
    "grpo_sequence": PLAIN | {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
    "grpo_delta": PLAIN | {"delta": 1.5, "epsilon": 0.01, "epsilon_high": 0.02},
    "grpo_entropy_quantile": PLAIN | {"top_entropy_quantile": 0.5, "scale_rewards": "none"},
    "grpo_off_policy_mask": PLAIN | {"off_policy_mask_threshold": 0.001},
    "grpo_off_policy_mask_reported": REPORTED | {"off_policy_mask_threshold": 0.5},
    "grpo_shuffled": PLAIN | TWO_MINIBATCHES | {"shuffle_minibatches": True},
    "grpo_tools": TOOLS | STRADDLING | {"mask_truncated_completions": True},
    "grpo_evaluation": GENERATED | EVALUATION | {"beta": 0.1, "top_entropy_quantile": 0.5},
    "grpo_generated": GENERATED | {"scale_rewards": "batch"},
    "grpo_several_batches_per_step": PLAIN
    | {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1},
    "grpo_tokens": PLAIN | {"max_tokens_per_micro_batch": 80, "padding_free": "never"},
    "grpo_two_rewards": PLAIN
    | {"reward_funcs": ["hard_label", "soft_label"], "multi_objective_aggregation": "normalize_then_sum"},
}
OTHER_OBJECTIVES: dict[str, dict[str, Any]] = {
    "rloo": PLAIN | TWO_MINIBATCHES | {"method": "rloo", "learning_rate": 5e-3},
    "rloo_normalized": PLAIN
    | {"method": "rloo", "reward_funcs": ["soft_label"], "normalize_advantages": True, "beta": 0.0},
    "rloo_corrected": REPORTED | CORRECTED | {"method": "rloo", "shuffle_minibatches": True} | TWO_MINIBATCHES,
    "rloo_tools": TOOLS | {"method": "rloo", "learning_rate": 5e-3},
    "maxrl": PLAIN | TWO_MINIBATCHES | {"method": "maxrl"},
    "maxrl_kl_shuffled": PLAIN | TWO_MINIBATCHES | {"method": "maxrl", "beta": 0.1, "shuffle_minibatches": True},
    "maxrl_tools": TOOLS | {"method": "maxrl"},
    "real": PLAIN | TWO_MINIBATCHES | {"method": "real"},
    "real_kl": TOOLS | STRADDLING | {"method": "real", "beta": 0.1},
    "real_corrected": REPORTED | CORRECTED | {"method": "real"},
    "disco": PLAIN | {"method": "real", "group_loss": "disco", "tau": 10.0},
    "disco_kl": PLAIN | TWO_MINIBATCHES | {"method": "real", "group_loss": "disco", "beta": 0.1},
}
CRITIC = {"method": "ppo", "critic_learning_rate": 0.05, "save_strategy": "steps", "save_steps": 4}
GENAC = {
    "method": "genac",
    "reward_funcs": ["label_or_none"],
    "critic_model_name_or_path": "critic",
    "critic_prompt": str(Path(__file__).parent / "miniature/critic_prompt.txt"),
    "critic_max_new_tokens": 8,
    "critic_pretraining_steps": 0,
    "critic_learning_rate": 0.01,
    "max_segments": 3,
    "gae_lambda": 0.5,
    "save_strategy": "steps",
    "save_steps": 4,
}
ACTOR_CRITIC: dict[str, dict[str, Any]] = {
    "ppo": PLAIN | CRITIC,
    "ppo_dapo": PLAIN | CRITIC | ADAMW | TWO_MINIBATCHES | {"loss_type": "dapo", "gamma": 0.99, "gae_lambda": 0.9},
    "ppo_warmup": TOOLS | CRITIC | {"critic_warmup_steps": 2, "beta": 0.1, "value_clip_range": None},
    "ppo_reported": REPORTED | CRITIC | {"delta": None, "whiten_advantages": False},
    "ppo_evaluation": GENERATED | CRITIC | EVALUATION,
    "genac": PLAIN | GENAC,
    "genac_pretraining": TOOLS | GENAC | ADAMW | {"critic_pretraining_steps": 2, "loss_type": "dapo"},
}
EXPERIMENTAL: dict[str, dict[str, Any]] = {
    "steer": PLAIN | {"method": "steer"},
    "steer_linear": REPORTED
    | CORRECTED
    | {"method": "steer", "token_weight_mapping": "linear", "reference": "snapshot", "group_layout": "split"},
    "verl": PLAIN | {"method": "verl", "hidden_state_stride": 3},
    "verl_last_token": TOOLS
    | {"method": "verl", "hidden_state_stride": 3, "group_layout": "split", "bonus_tokens": "last"}
    | {"reward_funcs": ["hard_label"]},
    "process_labels": PLAIN | {"method": "process_labels", "beta": 0.1, "reward_funcs": ["labels_of_steps"]},
    "process_labels_split": TOOLS
    | {"method": "process_labels", "proxy": "mean_logp", "group_layout": "split", "num_iterations": 1}
    | {"steps_per_generation": 4, "reward_funcs": ["labels_of_steps"]},
    "dars": PLAIN
    | {"method": "dars", "adaptive_rollouts": "equal_treatment", "max_generations": 8}
    | {"adaptive_rollouts_budget": 12, "reward_funcs": ["rare_label"]},
    "refill": PLAIN
    | {"method": "dars", "adaptive_rollouts": "hardness_weighted", "max_generations": 6}
    | {"refill_uniform_groups": True, "num_iterations": 1, "max_steps": 6, "reward_funcs": ["rare_label"]},
    "feedback": {"method": "guidance", "guidance": "feedback", "reward_funcs": ["math_reward"]}
    | {"max_guided_fraction": 0.5, "max_completion_length": 24},
    "guidance": PLAIN
    | {"method": "guidance", "guidance": "hint", "guided_weight": 0.5, "max_guided_fraction": 0.5}
    | {"reward_funcs": ["rare_label"]},
    "rlpr": {"method": "rlpr", "reward_funcs": ["pacs_trl.experimental.rlpr.probability_reward"]}
    | {"spread_filter": 1.0, "num_iterations": 1, "max_steps": 13},
}
WITH_LAG: dict[str, dict[str, Any]] = {
    "lag": LAG,
    "lag_snapshot": LAG | SNAPSHOT | {"rollout_lag": 2, "num_iterations": 2, "max_steps": 10},
    "lag_engine_logps": LAG | LORA | {"stale_logps": "engine", "beta": 0.1},
    "lag_rollout_func": LAG | {"reward_funcs": ["hard_label"], "rollout_func": "late_rollouts"},
    "lag_grpo": LAG | {"method": "grpo", "shuffle_minibatches": True, "beta": 0.1},
    "lag_rloo": LAG | {"method": "rloo"},
    "lag_maxrl": LAG | {"method": "maxrl", "rollout_lag": 2},
    "lag_real": LAG | {"method": "real"},
    "lag_recomputed": LAG | {"stale_logps": "recompute"},
}
ON_TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "straddling": PLAIN | {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
    "no_verdicts_split": PACS["no_verdicts_split"],
    "snapshot": PACS["lora_snapshot"],
    "kl": PACS["kl"],
    "generated": GENERATED,
    "grpo": GRPO["grpo_shuffled"] | {"method": "grpo", "beta": 0.1},
    "vespo": GRPO["grpo_vespo"] | {"method": "grpo"},
    "rloo": OTHER_OBJECTIVES["rloo"],
    "maxrl": OTHER_OBJECTIVES["maxrl_tools"],
    "real": OTHER_OBJECTIVES["real_kl"] | {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
    "ppo": PLAIN | CRITIC,
    "genac": PLAIN | GENAC,
    "steer": EXPERIMENTAL["steer_linear"],
    "verl": EXPERIMENTAL["verl"],
    "process_labels": EXPERIMENTAL["process_labels"],
    "dars": EXPERIMENTAL["dars"],
    "lag": LAG,
}


# Runs ---------------------------------------------------------------------------------------------------------------


def run_command(module: str, argv: list[str]) -> None:
    """Run `python -m MODULE ARGV` in this process."""
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as finished:
        if finished.code:
            raise RuntimeError(f"{module} {' '.join(argv)} ended with exit code {finished.code}") from finished


def train(output: Path, inputs: Path, recipe: dict[str, Any], name: str = "policy") -> None:
    """Run `pacs_trl.train` on a recipe, and keep its weights, its critic, and what it logged."""
    settings = COMMON | {"dataset_name": str(inputs / "problems.jsonl")} | recipe
    for key in ("model_name_or_path", "critic_model_name_or_path"):
        if key in settings or key == "model_name_or_path":
            settings[key] = str(inputs / settings.get(key, "policy"))
    for key in {"rollout_func", "environment"} & settings.keys():
        settings[key] = f"equality_scenarios:{settings[key]}"
    for key in ("reward_funcs", "tools"):
        if key in settings:
            settings[key] = [each if _is_of_package(each) else f"equality_scenarios.{each}" for each in settings[key]]
    if "environment" in settings:
        del settings["dataset_name"], settings["prompt_instruction"]
    if "eval_benchmarks" in settings:
        settings["eval_benchmarks"] = [str(inputs / f"{each}.jsonl") for each in settings["eval_benchmarks"]]
    settings["output_dir"] = str(output / "runs" / name)
    settings["verification_protocol"] = "authors"  # earlier commits have it as default
    file = output / f"{name}-{os.environ.get('RANK', '0')}.yaml"
    file.write_text(json.dumps(settings))
    run_command("pacs_trl.train", ["--config", str(file)])
    if os.environ.get("RANK", "0") == "0":
        keep(output, name, output / "runs" / name)


def _is_of_package(function: str) -> bool:
    return function == "math_reward" or function.startswith("pacs_trl.")


def keep(output: Path, name: str, run: Path) -> None:
    """Copy the weights of a finished run, and of the critic in its last checkpoint; add to the metrics."""
    for source, copy in [(run, name), *((critic, f"{name}-critic") for critic in sorted(run.glob("*/critic")))]:
        target = output / "weights" / copy
        target.mkdir(parents=True)
        for file in source.glob("*.safetensors"):
            shutil.copy(file, target)
    state = json.loads((run / "trainer_state.json").read_text())
    add_metrics(output, name, state["log_history"])


def add_metrics(output: Path, name: str, log_history: list[dict[str, Any]]) -> None:
    """Add logged numbers to `metrics.json`, with keys `RUN|STEP|METRIC`."""
    file = output / "metrics.json"
    numbers = json.loads(file.read_text()) if file.exists() else {}
    numbers |= {f"{name}|{log['step']}|{key}": value for log in log_history for key, value in log.items()}
    file.write_text(json.dumps(numbers, indent=1))


def two_processes(output: Path, inputs: Path) -> None:
    if "WORLD_SIZE" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        subprocess.run(
            [*command, str(inputs), str(output.parent), output.name],
            env=os.environ | {"ACCELERATE_USE_CPU": "true"},
            check=True,
            timeout=900,
        )
        return
    for name, recipe in ON_TWO_PROCESSES.items():
        train(output, inputs, recipe, name)


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedError


def resume(output: Path, inputs: Path, method: str, recipe: dict[str, Any]) -> None:
    """Stop after step 3, between two updates of a generation, and continue with a new trainer."""
    settings = {key: value for key, value in (COMMON | recipe).items() if key not in ("method", "prompt_instruction")}
    settings |= {"save_strategy": "steps", "save_steps": 3}
    rows = [json.loads(line) for line in (inputs / "problems.jsonl").read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": row["problem"]}]} for row in rows])

    def build_trainer(directory: str, callbacks: tuple = ()):
        return getattr(pacs_trl, f"{method}Trainer")(
            str(inputs / "policy"),
            hard_label,
            args=getattr(pacs_trl, f"{method}Config")(str(output / directory), **settings),
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(inputs / "policy"),
            rollout_func=None if "rollout_lag" in settings else plain_rollouts,
            callbacks=list(callbacks),
        )

    try:
        build_trainer("stopped", (StopAt(3),)).train()
    except InterruptedError:
        pass
    checkpoint = str(output / "stopped" / "checkpoint-3")
    for name, directory, start in (("resumed", "stopped", checkpoint), ("whole", "whole", None)):
        trainer = build_trainer(directory)
        trainer.train(resume_from_checkpoint=start)
        trainer.save_model(str(output / "weights" / name))
        add_metrics(output, name, trainer.state.log_history)
    resumed, whole = (load_file(output / "weights" / name / "model.safetensors") for name in ("resumed", "whole"))
    if not all(torch.equal(resumed[key], value) for key, value in whole.items()):
        raise ValueError("the resumed run ends with other weights than the one that was not stopped")


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "resume": ("PACS", ADAMW | {"max_steps": 5, "reference": "snapshot", "reference_reset_steps": 2}),
    "resume_grpo": ("GRPO", ADAMW | TWO_MINIBATCHES | {"max_steps": 6, "shuffle_minibatches": True, "beta": 0.1}),
    "resume_ppo": ("PPO", ADAMW | {"max_steps": 5, "critic_learning_rate": 0.01}),
    "resume_lag": (
        "RLOO",
        ADAMW
        | TWO_MINIBATCHES
        | {"max_steps": 6, "rollout_lag": 1, "num_iterations": 1, "reward_clip_range": (0.2, 0.8)},
    ),
}


def evaluate(output: Path, inputs: Path) -> None:
    """Run `pacs-trl evaluate`, and keep samples, grades, and results."""
    settings = {"model": inputs / "policy", "benchmarks": inputs / "benchmark.jsonl", "max_problems": 8}
    settings |= {"n": 4, "k": "1,2,4", "prompt_instruction": "", "temperature": 0.8, "top_p": 0.95}
    settings |= {"max_new_tokens": MAX_COMPLETION_LENGTH, "engine": "transformers", "batch_size": 6, "seed": 3}
    settings["output_dir"] = output / "evaluation"
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    run_command("pacs_trl.cli", ["evaluate", *words])
    for folder in ("samples", "grades"):
        shutil.copytree(output / "evaluation" / folder, output / "files" / folder)
    results = json.loads((output / "evaluation" / "results.json").read_text())["benchmarks"]
    (output / "files" / "benchmarks.json").write_text(json.dumps(results, indent=1))


RECIPES = PACS | {name: {"method": "grpo"} | recipe for name, recipe in GRPO.items()}
RECIPES |= OTHER_OBJECTIVES | ACTOR_CRITIC | EXPERIMENTAL | WITH_LAG
SCENARIOS: dict[str, Callable[[Path, Path], None]] = {
    name: functools.partial(train, recipe=recipe) for name, recipe in RECIPES.items()
}
SCENARIOS |= {
    name: functools.partial(resume, method=method, recipe=recipe) for name, (method, recipe) in RESUMED.items()
}
SCENARIOS |= {"two_processes": two_processes, "evaluate": evaluate}


def main() -> None:
    inputs, output = Path(sys.argv[1]), Path(sys.argv[2])
    print("pacs_trl from", Path(pacs_trl.__file__).parent)
    names = sys.argv[3:] or list(SCENARIOS)
    if unknown := set(names) - set(SCENARIOS):
        sys.exit(f"There is no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}.")
    for name in names:
        print(f"scenario {name}", flush=True)
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            SCENARIOS[name](folder, inputs)
        except BaseException:  # also SystemExit of a command: the other scenarios still say something
            if "WORLD_SIZE" in os.environ:
                raise
            traceback.print_exc()
            (folder / "error.txt").write_text(traceback.format_exc())
        (folder / "seconds.txt").write_text(f"{time.perf_counter() - started:.1f}")
    if "WORLD_SIZE" not in os.environ:
        (output / "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main()
