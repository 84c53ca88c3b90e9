"""Ranges and words of the settings: the tables by which a value is legal or not."""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """Legal values of a number: from `least` (or `above`) to `most` (or `below`), and `also` this one."""

    why: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    whole: bool = False
    also: int | None = None

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if value == self.also:
            return True
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (not self.whole or isinstance(value, int))
        )

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}" if abs(bound) < 1e5 else f"{word} {bound}"
            for word, bound in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if bound is not None
        ]
        kind = "a whole number of " if self.whole else ""
        return kind + " and ".join(bounds) + ("" if self.also is None else f", or {self.also}")

    def nearest(self, value: float) -> float | None:
        """The legal value next to an illegal one, if there is one."""
        if self.least is not None and value < self.least:
            return self.least
        if self.most is not None and value > self.most:
            return self.most
        return max(self.least or 0, round(value)) if self.whole else None


def count(what: str, least: int = 1) -> Range:
    """Return the range of a setting that counts something."""
    return Range(f"it counts the {what}", least=least, whole=True)


_PORT = Range("it is a port", least=1, most=65535, whole=True)
_SEED = Range("it seeds a generator", least=0, most=2**32 - 1, whole=True)
_INTERVAL = Range("it says how often, in optimizer steps or, below 1, in shares of the run", above=0)
_MOMENT = Range("it is the decay of a moving average of Adam", least=0, below=1)

RANGES = {
    # sizes
    "per_device_train_batch_size": count("rows of a micro-batch"),
    "per_device_eval_batch_size": count("rows of a micro-batch in evaluation"),
    "gradient_accumulation_steps": count("micro-batches of an optimizer step"),
    "steps_per_generation": count("micro-batches of a generation"),
    "generation_batch_size": count("completions of a generation"),
    "num_iterations": count("updates from a completion"),
    "num_generations": count("completions of a prompt, which are compared with each other", least=2),
    "num_generations_eval": count("completions of a prompt in evaluation"),
    "max_completion_length": count("tokens of a completion"),
    "max_prompt_length": count("tokens of a prompt"),
    "max_tokens_per_micro_batch": count("tokens of a micro-batch"),
    "max_train_samples": count("problems that are trained on"),
    "eval_split_size": count("problems that are held out", least=0),
    "expected_processes": count("processes that the batch is written for"),
    # generation
    "temperature": Range("logits are divided by it", above=0),
    "top_p": Range("it is the probability mass that is kept; 1 keeps all", above=0, most=1),
    "top_k": Range("it counts the tokens that are kept; 0 keeps all", least=0, whole=True),
    "min_p": Range("it is a share of the largest probability", least=0, most=1),
    "repetition_penalty": Range("logits are divided by it; 1 is no penalty", above=0),
    "vllm_gpu_memory_utilization": Range("it is the share of each GPU's memory that vLLM takes", above=0, most=1),
    "vllm_tensor_parallel_size": count("GPUs that share an engine"),
    "vllm_max_model_length": count("tokens of prompt and completion"),
    "vllm_server_port": _PORT,
    "vllm_group_port": Range("it is a port; 0 lets the system choose", least=0, most=65535, whole=True),
    "vllm_server_timeout": Range("it counts the seconds to wait for the server", least=0),
    "vllm_importance_sampling_clip_max": Range("it bounds ratios of probabilities", above=0),
    "vllm_importance_sampling_clip_min": Range("it bounds ratios of probabilities", least=0),
    "max_tool_calling_iterations": count("rounds of tool calls"),
    # objectives
    "beta": Range("it is the weight of the KL term; 0 leaves it out", least=0),
    "pacs_beta": Range(
        "it scales the implicit reward, and at 0 nothing is learned; `beta` is the weight of the KL term", above=0
    ),
    "actor_term_coef": Range(
        "it is the weight of the actor term of eq. 5; 0 leaves it out, as the authors do", least=0
    ),
    "reference_reset_steps": count("optimizer steps between renewals of the snapshot"),
    "max_non_finite_steps": count("skipped steps in a row after which training stops"),
    "epsilon": Range("it bounds how far a ratio may fall below 1", above=0),
    "epsilon_high": Range("it bounds how far a ratio may rise above 1", above=0),
    "delta": Range("it bounds ratios of probabilities", above=0),
    "gamma": Range("it is the discount per token, in [0, 1]; the authors use 1.0", least=0, most=1),
    "gae_lambda": Range("it is the lambda of advantage estimation, in [0, 1]; the authors use 1.0", least=0, most=1),
    "value_clip_range": Range("it bounds how far a value may move; None turns clipping off", above=0),
    "critic_learning_rate": Range("without learning, the critic's values are noise", above=0),
    "critic_warmup_steps": count("optimizer steps in which only the critic learns", least=0),
    "critic_max_new_tokens": count("tokens of an answer of the critic"),
    "critic_batch_size": count("answers of a forward pass of the critic"),
    "critic_lora_r": count("ranks of the critic's adapter"),
    "segment_probability": Range("it is a probability; None leaves the rule out", above=0, most=1),
    "segment_length": count("tokens of a segment"),
    "max_segments": count("segments of a completion"),
    "critic_ratio_cap": Range("it bounds ratios of probabilities, which are 1 where nothing differs", least=1),
    "critic_pretraining_steps": count("optimizer steps in which only the critic learns", least=0),
    "ref_model_mixup_alpha": Range("it is the share of the policy in the KL reference", least=0, most=1),
    "ref_model_sync_steps": count("optimizer steps between updates of the KL reference"),
    # optimizer and schedule
    "learning_rate": Range("weights move by about so much per step", least=0),
    "weight_decay": Range("weights shrink by this times the learning rate per step", least=0),
    "adam_beta1": _MOMENT,
    "adam_beta2": _MOMENT,
    "adam_epsilon": Range("it keeps Adam from dividing by 0", above=0),
    "max_grad_norm": Range("gradients above it are scaled down; 0 does not clip", least=0),
    "warmup_steps": Range("it counts optimizer steps or, below 1, is a share of the run", least=0),
    "num_train_epochs": Range("it counts passes over the prompts", above=0),
    "max_steps": Range("it counts optimizer steps; -1 goes by num_train_epochs", least=1, whole=True, also=-1),
    # run
    "logging_steps": _INTERVAL,
    "save_steps": _INTERVAL,
    "eval_steps": _INTERVAL,
    "eval_delay": Range("it counts optimizer steps or epochs", least=0),
    "save_total_limit": count("checkpoints that are kept"),
    "torch_empty_cache_steps": count("optimizer steps between clean-ups"),
    "seed": _SEED,
    "data_seed": _SEED,
    "dataset_seed": _SEED,
    "dataloader_num_workers": count("processes that load data", least=0),
    "dataloader_prefetch_factor": count("batches that are loaded ahead"),
    "ddp_timeout": count("seconds after which a collective operation fails"),
    # LoRA
    "lora_r": count("ranks of an adapter"),
    "lora_alpha": Range("adapters are scaled by it over lora_r", above=0),
    "lora_dropout": Range("it is the share of activations that are dropped", least=0, below=1),
    # verification
    "verification_num_workers": count("processes that grade"),
    "verification_timeout_seconds": Range("it is the wall-clock limit per completion", above=0),
    "verification_cpu_seconds": Range("it is the processor time limit per completion", above=0),
    "verification_memory_limit_mb": Range("sympy itself takes about 100", least=256, whole=True),
    "code_timeout_seconds": Range("it is the wall-clock limit of a program per test", above=0),
    "code_cpu_seconds": Range("it is the processor time limit of a program per test", above=0),
    "code_memory_limit_mb": Range("Python itself takes about 60", least=128, whole=True),
    "verification_max_failure_share": Range("it is a share of the recent completions", least=0, most=1),
}

# Words that the libraries take and look at only in the middle of a run.
CHOICES = {
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers", "auto"),
    "verification_protocol": ("authors", "trl"),
    "code_isolation": ("landlock+seccomp", "seccomp", "landlock", "rlimits"),
    "code_label": ("all", "share"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
