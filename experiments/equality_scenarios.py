"""Scenarios of `equality.py`: `python equality_scenarios.py OUTPUT [NAME ...]`, with a package on PYTHONPATH.

Each scenario writes to OUTPUT/NAME: trained weights to `weights/`, metrics to `metrics.json`, and files that must be
equal byte for byte to `files/`. The model is the tiny miniature one with random weights, which never answers
correctly; completions and labels are therefore pseudo-random functions of their context. Only public names of the
package are used, and nothing of `tests/`, so that this file runs with the package of earlier commits.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

import pacs_trl
from pacs_trl import PACSTrainer
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.run import main as evaluation_main
from pacs_trl.experimental import rlpr
from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tokenizer import build_tokenizer
from pacs_trl.recipe import config_class, trainer_of_method
from pacs_trl.train import main as train_main


TOKENIZER = build_tokenizer()
MAX_COMPLETION_LENGTH = 16
NO_VERDICT_BELOW = 0.15


def _number(completion_ids: list[int]) -> float:
    """Return a number in [0, 1) that depends on every token."""
    return int.from_bytes(hashlib.sha256(str(list(completion_ids)).encode()).digest()[:6]) / 2**48


def hard_label(completion_ids, **kwargs) -> list[float]:
    return [float(_number(ids) < 0.5) for ids in completion_ids]


def rare_label(completion_ids, **kwargs) -> list[float]:
    return [float(_number(ids) < 0.2) for ids in completion_ids]


def labels_of_steps(completion_ids, **kwargs) -> list[list[tuple[int, float]] | None]:
    """Return up to three labels per completion, the last one for the outcome; `None` for some."""
    found = []
    for ids in completion_ids:
        ends = sorted({len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1})
        pairs = [(end, float(_number(ids[: end + 1]) < 0.5)) for end in ends]
        found.append(None if _number(ids) < NO_VERDICT_BELOW else pairs)
    return found


def soft_label(completion_ids, **kwargs) -> list[float]:
    return [_number(ids) for ids in completion_ids]


def label_or_none(completion_ids, **kwargs) -> list[float | None]:
    numbers = [_number(ids) for ids in completion_ids]
    return [None if number < NO_VERDICT_BELOW else float(number < 0.5) for number in numbers]


@dataclass
class Rows:
    """Rollout function: completions depend only on the step and the position in the generation."""

    logprobs: bool = False
    tools: bool = False

    def __call__(self, prompts, trainer) -> dict:
        first = trainer.accelerator.process_index * len(prompts)
        output = {"prompt_ids": [TOKENIZER(prompt[-1]["content"])["input_ids"] for prompt in prompts]}
        rows = [self._row(trainer.state.global_step, first + i) for i in range(len(prompts))]
        output["completion_ids"], logprobs, mask = map(list, zip(*rows, strict=True))
        output["logprobs"] = logprobs if self.logprobs else None
        return output | ({"env_mask": mask} if self.tools else {})

    @staticmethod
    def _row(step: int, position: int) -> tuple[list[int], list[float], list[int]]:
        rng = np.random.default_rng([step, position])
        ids = rng.integers(0, 256, size=rng.integers(1, MAX_COMPLETION_LENGTH)).tolist()
        if rng.random() < 0.75:
            ids.append(TOKENIZER.eos_token_id)
        return ids, rng.uniform(-8.0, -3.0, len(ids)).tolist(), (rng.random(len(ids)) < 0.7).astype(int).tolist()


def boxed(prompts, trainer) -> dict:
    """Return completions with an answer in a box, except for every fourth."""
    texts = [f"{i % 4}{'x' * (i % 2)}" + (r"\boxed{7}" if i % 4 else "7") for i in range(len(prompts))]
    ids = [TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] for text in texts]
    prompt_ids = [TOKENIZER(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def dataset() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row.problem}], "solution": row.solution, "hint": "Add the tens."}
            for row in load_benchmark("miniature/addition", max_problems=32).problems
        ]
    )


@functools.cache
def model_path(output: Path) -> str:
    """Save the model with log-probs far from uniform, so that rounding would be visible."""
    path = output / "model"
    if not (path / "tokenizer.json").exists():
        model = build_model(TOKENIZER, "tiny")
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.mul_(5.0)
        model.save_pretrained(path)
        TOKENIZER.save_pretrained(path)
    return str(path)


# Optimizer steps of 4 prompts x 4 completions, two for each generation: the first has all proxies at 0, the second has
# not.
SETTINGS = {
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
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}
STRADDLING = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
}  # 3 prompts; groups lie in two batches

# Of plain PACS runs: settings, and what else the trainer gets.
PACS = {
    "rollout": ({}, {}),
    "adamw": (ADAMW | {"max_grad_norm": 0.5, "steps_per_generation": 4}, {}),
    "snapshot": (
        ADAMW | {"reference": "snapshot", "reference_reset_steps": 3, "reset_optimizer_on_reference_reset": True},
        {},
    ),
    "lora": ({}, {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])}),
    "whole": ({"group_layout": "whole"}, {}),
    "split": ({"group_layout": "split"} | STRADDLING, {}),
    "split_tokens": ({"group_layout": "split", "max_tokens_per_micro_batch": 80}, {}),
    "kl": ({"beta": 0.1}, {}),
    "no_verdicts": ({"mask_truncated_completions": True}, {"reward": label_or_none, "rows": Rows(tools=True)}),
    "no_verdicts_split": (
        {"beta": 0.1, "group_layout": "split"} | STRADDLING,
        {"reward": label_or_none, "rows": Rows(tools=True)},
    ),
    "soft_labels": ({"score_estimator": "dr_grpo", "class_weighting": "none"}, {"reward": soft_label}),
    "grpo_score": ({"score_estimator": "grpo", "first_update_score": "dr_grpo", "actor_term_coef": 1.0}, {}),
    "mean_logp": ({"proxy": "mean_logp", "actor_term_coef": 0.5}, {}),
    "token_weights": (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        {"rows": Rows(logprobs=True)},
    ),
    "padded": ({"padding_free": "never"}, {}),
    "padded_split": ({"padding_free": "never", "group_layout": "split"} | STRADDLING, {}),
}
CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
FIRST_ONLY = {"num_iterations": 1, "max_steps": 6}
# Of the related methods: the module, its settings, and what else the trainer gets.
EXPERIMENTAL: dict[str, tuple[str, dict, dict]] = {
    "steer": ("steer", {}, {}),
    "steer_linear": (
        "steer",
        {"token_weight_mapping": "linear", "reference": "snapshot", "group_layout": "split"} | CORRECTED,
        {"rows": Rows(logprobs=True)},
    ),
    "verl": ("verl", {"hidden_state_stride": 3}, {}),
    "verl_last_token": (
        "verl",
        {"hidden_state_stride": 3, "group_layout": "split", "bonus_tokens": "last"},
        {"rows": Rows(tools=True)},
    ),
    "process_labels": ("process_labels", {"beta": 0.1}, {"reward": labels_of_steps}),
    "process_labels_split": (
        "process_labels",
        {"proxy": "mean_logp", "group_layout": "split", "num_iterations": 1, "steps_per_generation": 4},
        {"reward": labels_of_steps, "rows": Rows(tools=True)},
    ),
    "dars": (
        "dars",
        {"adaptive_rollouts": "equal_treatment", "max_generations": 8, "adaptive_rollouts_budget": 12},
        {"reward": rare_label},
    ),
    "refill": (
        "dars",
        {"adaptive_rollouts": "hardness_weighted", "max_generations": 6, "refill_uniform_groups": True} | FIRST_ONLY,
        {"reward": rare_label},
    ),
    "guidance": (
        "guidance",
        {"guidance": "hint", "guided_weight": 0.5, "max_guided_fraction": 0.5},
        {"reward": rare_label},
    ),
    "rlpr": (
        "rlpr",
        {"spread_filter": 1.0, "num_iterations": 1, "max_steps": 13},
        {"reward": rlpr.probability_reward, "rows": boxed},
    ),
}
OF_TWO_PROCESSES = {
    "straddling": ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}, {}),
    "no_verdicts_split": PACS["no_verdicts_split"],
}


def build_trainer(output, model, settings, reward=hard_label, rows=None, method="pacs", **more) -> PACSTrainer:
    return trainer_of_method(method)(
        model,
        reward,
        args=config_class(method)(str(output), **(SETTINGS | settings)),
        train_dataset=dataset(),
        processing_class=TOKENIZER,
        rollout_func=rows or Rows(),
        **more,
    )


def keep(trainer, output: Path, name: str = "policy") -> None:
    """Write the weights, and add to the metrics by step."""
    trainer.save_model(str(output / "weights" / name))
    if trainer.accelerator.is_main_process:
        numbers = {
            f"{name}/{entry['step']}/{key}": value
            for entry in trainer.state.log_history
            for key, value in entry.items()
        }
        write_metrics(output, numbers)


def write_metrics(output: Path, numbers: dict) -> None:
    file = output / "metrics.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | numbers, indent=1))


def method_run(
    output: Path, model: str, settings: dict, more: dict, method: str = "pacs", name: str = "policy"
) -> None:
    trainer = build_trainer(output / "run", model, settings, method=method, **more)
    trainer.train()
    keep(trainer, output, name)


def two_processes(output: Path, model: str) -> None:
    if "WORLD_SIZE" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        subprocess.run(
            [*command, str(output.parent), output.name],
            env=os.environ | {"ACCELERATE_USE_CPU": "true"},
            check=True,
            timeout=900,
        )
        return
    for name, (settings, more) in OF_TWO_PROCESSES.items():
        method_run(output, model, settings, more, name=name)


class KilledAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedError


def resume(output: Path, model: str) -> None:
    """Stop after step 3, between two updates of a generation, and continue with a new trainer."""
    settings = ADAMW | {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "reference": "snapshot"}
    settings["reference_reset_steps"] = 2
    try:
        build_trainer(output / "run", model, settings, callbacks=[KilledAt(3)]).train()
    except InterruptedError:
        pass
    resumed = build_trainer(output / "run", model, settings)
    resumed.train(resume_from_checkpoint=str(output / "run" / "checkpoint-3"))
    keep(resumed, output, "resumed")
    whole = build_trainer(output / "whole", model, settings)
    whole.train()
    keep(whole, output, "whole")
    found, expected = (load_file(output / "weights" / name / "model.safetensors") for name in ("resumed", "whole"))
    if not all(torch.equal(found[name], value) for name, value in expected.items()):
        raise ValueError("the resumed run ends with other weights than the one that was not stopped")


def ppo(output: Path, model: str) -> None:
    """One update of policy and critic; the checkpoint contains both."""
    settings = {"num_iterations": 1, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    method_run(output, model, settings | {"critic_learning_rate": 0.05}, {}, "ppo")
    shutil.copytree(output / "run" / "checkpoint-1" / "critic", output / "weights" / "critic")


def genac(output: Path, model: str) -> None:
    """Two updates of policy and critic, whose untrained answers count as values."""
    settings = {"num_iterations": 1, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"critic_prompt": "miniature", "critic_max_new_tokens": 8, "critic_pretraining_steps": 0}
    settings |= {"max_segments": 3, "gae_lambda": 0.5}
    trainer = build_trainer(output / "run", model, settings, label_or_none, method="genac")
    trainer._prompt.parse = lambda text: len(text) % 11 / 10
    trainer.train()
    keep(trainer, output)
    shutil.copytree(output / "run" / "checkpoint-2" / "critic", output / "weights" / "critic")


def train(output: Path, model: str, **settings) -> None:
    """Run `pacs_trl.train` on a recipe."""
    recipe = SETTINGS | {
        "model_name_or_path": model,
        "dataset_name": "miniature/addition",
        "prompt_instruction": "",
        "reward_funcs": ["equality_scenarios.hard_label"],
        "output_dir": str(output / "run"),
    }
    (output / "recipe.yaml").write_text(json.dumps(recipe | settings))
    keep(train_main(["--config", str(output / "recipe.yaml")]), output)


def generated(output: Path, model: str) -> None:
    """PACS with completions generated by transformers, and labels of two reward functions."""
    rewards = ["math_reward", "equality_scenarios.hard_label"]
    train(output, model, method="pacs", reward_funcs=rewards, reward_weights=[0.5, 0.5])


def evaluate(output: Path, model: str) -> None:
    results = output / "evaluation"
    settings = {"benchmarks": "miniature/addition,miniature/terms_3", "max_problems": 4, "n": 4, "k": "1,2,4"}
    settings |= {"prompt_instruction": "", "temperature": 0.8, "top_p": 0.95, "max_new_tokens": MAX_COMPLETION_LENGTH}
    settings |= {"engine": "transformers", "batch_size": 6, "seed": 3}
    argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    evaluation_main(["--model", model, "--output_dir", str(results), *argv])
    entries = json.loads((results / "results.json").read_text())["benchmarks"]
    for folder in ("samples", "grades"):
        shutil.copytree(results / folder, output / "files" / folder)
    (output / "files" / "benchmarks.json").write_text(json.dumps(entries, indent=1))


METHODS = {name: ("pacs", *of_run) for name, of_run in PACS.items()} | EXPERIMENTAL
SCENARIOS = {
    name: functools.partial(method_run, method=method, settings=settings, more=more)
    for name, (method, settings, more) in METHODS.items()
}
SCENARIOS |= {f.__name__: f for f in (two_processes, resume, ppo, genac, generated, evaluate)}


def main() -> None:
    output = Path(sys.argv[1])
    print("pacs_trl from", Path(pacs_trl.__file__).parent)
    names = sys.argv[2:] or list(SCENARIOS)
    if unknown := set(names) - set(SCENARIOS):
        sys.exit(f"There is no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}.")
    for name in names:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            SCENARIOS[name](folder, model_path(output))
        except BaseException:  # also SystemExit of a command line: the other scenarios still say something
            if "WORLD_SIZE" in os.environ:
                raise
            traceback.print_exc()
            (folder / "error.txt").write_text(traceback.format_exc())
        (folder / "seconds.txt").write_text(f"{time.perf_counter() - started:.1f}")
    if "WORLD_SIZE" not in os.environ:
        (output / "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main()
