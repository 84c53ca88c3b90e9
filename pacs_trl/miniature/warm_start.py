r"""A short supervised warm start: a miniature model that knows the format of an answer but is seldom right.

Reinforcement learning needs a policy that is right now and then. This trains one with TRL's SFTTrainer on worked
solutions and stops at a low accuracy, so that most of what the model can learn is left. The result is an ordinary
checkpoint with its tokenizer, made once and kept in a directory named after everything that decides it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from pacs_trl.evaluation.requests import SamplingSettings
from pacs_trl.evaluation.sampling import sample_completions
from pacs_trl.miniature import model, tasks, tokenizer
from pacs_trl.miniature.model import build_model
from pacs_trl.miniature.tasks import demonstrations, problems
from pacs_trl.miniature.tokenizer import build_tokenizer


CACHE_DIR = Path("outputs/miniature/warm_start")

# Longest completion that is sampled to measure the accuracy; worked solutions have at most 67 tokens, those of the small
# tasks 27.
MAX_COMPLETION_LENGTH = 72

# What differs from the defaults of WarmStartSettings. The smallest model wants larger steps; at the default it would take
# thousands of them. In the mixture of the tables the hard sums are seldom right, so the easy ones have to be more often.
SIZE_SETTINGS = {"tiny": {"learning_rate": 2e-3}}
TASK_SETTINGS = {"arithmetic": {"target_accuracy": 0.2}}

# A warm start inside `accelerate launch` or torchrun is made by one process alone, on the CPU: what belongs to the group
# of processes around it must not reach it.
_DISTRIBUTED_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_DISTRIBUTED_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")


@dataclass(frozen=True)
class WarmStartSettings:
    """
    Everything that decides a warm start, apart from the code.

    Args:
        task (`str`):
            Key of `tasks.TASKS`.
        size (`str`, *optional*, defaults to `"small"`):
            Key of `model.MODEL_SIZES`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the initial weights, of the demonstrations and of their order.
        target_accuracy (`float`, *optional*, defaults to `0.15`):
            Training stops as soon as this share of sampled completions (temperature 1, one for each of `num_probes`
            training problems) is right.
        max_steps (`int`, *optional*, defaults to `4000`):
            Optimizer steps after which training stops in any case.
        probe_steps (`int`, *optional*, defaults to `25`):
            Optimizer steps between two measurements of the accuracy.
        num_probes (`int`, *optional*, defaults to `256`):
            Problems per measurement.
        batch_size (`int`, *optional*, defaults to `16`):
            Demonstrations per optimizer step.
        learning_rate (`float`, *optional*, defaults to `7e-4`):
            Learning rate of AdamW, constant after 20 steps of linear warm-up.
    """

    task: str
    size: str = "small"
    seed: int = 0
    target_accuracy: float = 0.15
    max_steps: int = 4000
    probe_steps: int = 25
    num_probes: int = 256
    batch_size: int = 16
    learning_rate: float = 7e-4

    def digest(self) -> str:
        """Hash of the settings and of the code that turns them into a model: a change of either makes a new one."""
        content = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for module_file in (model.__file__, tasks.__file__, tokenizer.__file__, __file__):
            content.update(Path(module_file).read_bytes())
        return content.hexdigest()[:12]


def warm_start(task: str, *, cache_dir: str | Path = CACHE_DIR, **settings) -> Path:
    """
    Directory of a warm-started miniature model, made on first use.

    The work is done in a process of its own, on the CPU: the caller may be one of several distributed processes, may own
    a GPU, and keeps its random state. An interrupted run leaves nothing under the final name.

    Args:
        task (`str`):
            Key of `tasks.TASKS`, or `TASK/SIZE`.
        cache_dir (`str` or `Path`, *optional*, defaults to `outputs/miniature/warm_start`):
            Where warm starts are kept, one directory for each set of settings.
        **settings:
            Further fields of [`WarmStartSettings`].

    Returns:
        `Path`: checkpoint with tokenizer, ready for `model_name_or_path`; `warm_start.json` in it holds the settings, the
        number of steps and the accuracy reached.

    Raises:
        `ValueError`: if the task or the size is unknown, or `cache_dir` is not a directory.
        `subprocess.CalledProcessError`: if training fails.
    """
    task, _, size = task.partition("/")
    settings |= {"size": size} if size else {}
    settings = SIZE_SETTINGS.get(settings.get("size"), {}) | TASK_SETTINGS.get(task, {}) | settings
    wanted = WarmStartSettings(task=task, **settings)
    if task not in tasks.TASKS:
        raise ValueError(f"unknown miniature task {task!r}; choose one of {', '.join(tasks.TASKS)}")
    if wanted.size not in model.MODEL_SIZES:
        raise ValueError(f"unknown model size {wanted.size!r}; choose one of {', '.join(model.MODEL_SIZES)}")
    directory = Path(cache_dir) / f"{task}-{wanted.size}-{wanted.seed}-{wanted.digest()}"
    if directory.is_dir():
        return directory
    if Path(cache_dir).exists() and not Path(cache_dir).is_dir():
        raise ValueError(f"cache_dir {str(cache_dir)!r} is a file; name a directory for the warm starts")
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _DISTRIBUTED_VARIABLES and not name.startswith(_DISTRIBUTED_PREFIXES)
    } | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".partial-") as partial:
        command = [
            sys.executable,
            "-m",
            "pacs_trl.miniature.warm_start",
            json.dumps(asdict(wanted)),
            f"{partial}/model",
        ]
        # Standard output gets the trainer's metrics; its progress bar goes to standard error, which stays visible.
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        try:
            os.rename(f"{partial}/model", directory)
        except OSError:
            # Another process has finished the same, equal warm start in the meantime.
            if not directory.is_dir():
                raise
    return directory


def train_warm_start(settings: WarmStartSettings, output_dir: str | Path) -> dict[str, float]:
    """
    Train a warm start in this process and save model, tokenizer and `warm_start.json` to `output_dir`.

    Returns:
        `dict[str, float]`: `"steps"` taken and the `"accuracy"` measured last, in [0, 1].
    """
    model_tokenizer = build_tokenizer()
    rows = [
        {
            "prompt": [{"role": "user", "content": row["problem"]}],
            "completion": [{"role": "assistant", "content": row["solution"]}],
        }
        for row in demonstrations(settings.task, seed=settings.seed)[: settings.max_steps * settings.batch_size]
    ]
    probe = StopAtAccuracy(settings, model_tokenizer)
    trainer = SFTTrainer(
        model=build_model(model_tokenizer, settings.size, settings.seed),
        processing_class=model_tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[probe],
        args=SFTConfig(
            output_dir=str(output_dir),
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            adam_beta2=0.98,
            max_steps=settings.max_steps,
            max_length=None,
            bf16=False,
            dataloader_pin_memory=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=settings.probe_steps,
            report_to="none",
            seed=settings.seed,
        ),
    )
    trainer.train()
    trainer.save_model()
    outcome = {"steps": trainer.state.global_step, "accuracy": probe.accuracy}
    report = {"settings": asdict(settings), **outcome}
    (Path(output_dir) / "warm_start.json").write_text(json.dumps(report, indent=1) + "\n")
    return outcome


class StopAtAccuracy(TrainerCallback):
    """Samples answers to training problems every `probe_steps` steps and stops training at the target accuracy."""

    def __init__(self, settings: WarmStartSettings, processing_class):
        self.settings = settings
        self.processing_class = processing_class
        self.rows = problems(settings.task, "train", settings.num_probes, seed=settings.seed)
        self.accuracy = 0.0

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self.settings.probe_steps == 0 or state.global_step == self.settings.max_steps:
            self.accuracy = self.measure(model)
            control.should_training_stop |= self.accuracy >= self.settings.target_accuracy

    def measure(self, model) -> float:
        """Share of right answers, one completion for each problem at temperature 1, the same random streams each time."""
        drawn = sample_completions(
            model,
            self.processing_class,
            [[{"role": "user", "content": row["problem"]}] for row in self.rows],
            n=1,
            settings=SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=MAX_COMPLETION_LENGTH),
            seed=self.settings.seed,
            batch_size=len(self.rows),
        )
        # The answers are integers without leading zeros: comparing text is what a verifier would do, only quicker.
        right = [
            completion.text.endswith(rf"\boxed{{{row['answer']}}}")
            for row, (completion,) in zip(self.rows, drawn, strict=True)
        ]
        return sum(right) / len(right)


if __name__ == "__main__":
    train_warm_start(WarmStartSettings(**json.loads(sys.argv[1])), sys.argv[2])
