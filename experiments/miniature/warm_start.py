r"""Supervised warm start of a miniature model to a target accuracy.

TRL's SFTTrainer trains on worked solutions until the running average of the weights exceeds the target accuracy. The
result is interpolated between the last two measured averages, so that every seed, machine, and number of threads
starts with the same accuracy on held-out problems. It is an ordinary checkpoint with tokenizer, cached in a directory
named after all settings.
"""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer

from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.requests import Request, SamplingSettings, sample_seed

from . import model as models
from . import tasks, tokenizer
from .model import build_model
from .tasks import demonstrations, looks_right, problems
from .tokenizer import build_tokenizer


CACHE_DIR = Path("outputs/miniature/warm_start")

CARD = """---
license: apache-2.0
---

A model of the miniature, made from scratch by `experiments.miniature.warm_start`.
"""

Weights = dict[str, torch.Tensor]

# Worked solutions have at most 67 tokens.
MAX_COMPLETION_LENGTH = 72

# Single steps change accuracy by several points; the average rises steadily.
AVERAGE_DECAY = 0.99

# Probes and evaluations use smaller sampling seeds.
CALIBRATION_SEED = 1_000_000

# The smallest model needs a larger learning rate. In the tables hard sums are rarely correct, so the target is higher.
SIZE_SETTINGS = {"tiny": {"learning_rate": 2e-3}}
TASK_SETTINGS = {"arithmetic": {"target_accuracy": 0.2}}

# Variables of `accelerate launch` and torchrun, which the process of the warm start must not inherit.
_DISTRIBUTED = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|ACCELERATE_|FSDP_|TORCHELASTIC_")


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of a warm start. With the target `None` training ends after `max_steps` without a measurement."""

    task: str  # key of `tasks.TASKS`
    size: str = "small"  # key of `model.MODEL_SIZES`
    seed: int = 0  # of the initial weights and of the demonstrations
    target_accuracy: float | None = 0.15  # share of correct completions (temperature 1) on held-out problems
    max_steps: int = 6000  # optimizer steps within which the target must be reached
    probe_steps: int = 50  # optimizer steps between two measurements of the accuracy
    num_probes: int = 256  # training problems per measurement, one completion each
    num_calibration_samples: int = 6  # completions per held-out problem when weights are interpolated
    batch_size: int = 16  # demonstrations per optimizer step
    learning_rate: float = 7e-4  # of AdamW, constant after 20 steps of linear warm-up

    def digest(self) -> str:
        """Return a hash of the settings and of the code, so that a change of either trains a new warm start."""
        content = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for module_file in (models.__file__, tasks.__file__, tokenizer.__file__, __file__):
            content.update(Path(module_file).read_bytes())
        return content.hexdigest()[:12]


def warm_start(task: str, *, cache_dir: str | Path = CACHE_DIR, **settings) -> Path:
    """
    Return the directory of a warm-started miniature model, trained on first use in a separate CPU process: the caller
    may be one of several distributed processes, and keeps its random state. An interrupted run leaves no files.

    `task` may be `TASK/SIZE`; `settings` are other fields of [`WarmStartSettings`]. The directory is a checkpoint with
    tokenizer; its `warm_start.json` has settings, steps, and accuracies.
    """
    task, _, size = task.partition("/")
    settings |= {"size": size} if size else {}
    settings = SIZE_SETTINGS.get(settings.get("size", ""), {}) | TASK_SETTINGS.get(task, {}) | settings
    wanted = WarmStartSettings(task=task, **settings)
    tasks.check_task(task)
    models.check_size(wanted.size)
    directory = Path(cache_dir) / f"{task}-{wanted.size}-{wanted.seed}-{wanted.digest()}"
    if directory.is_dir():
        return directory
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not _DISTRIBUTED.match(name)}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]  # the working directory may be another
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    if not sys.stderr.isatty():  # no progress bars in a pipe or a file
        environment |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".partial-") as partial:
        arguments = [json.dumps(asdict(wanted)), f"{partial}/model"]
        command = [sys.executable, "-m", "experiments.miniature.warm_start", *arguments]
        # The trainer prints metrics to stdout, progress and warnings to stderr. The process leads a new group, so that
        # Ctrl-C reaches only this process, which then ends it without a traceback.
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, process_group=0)
        try:
            os.rename(f"{partial}/model", directory)
        except OSError:
            if not directory.is_dir():  # else another process has finished the same warm start
                raise
    return directory


def train_warm_start(settings: WarmStartSettings, output_dir: str | Path) -> dict[str, Any]:
    """
    Train a warm start in this process; save model, tokenizer, and `warm_start.json` to `output_dir`.

    Return `"steps"` and `"calibration"`: pairs of an interpolation factor between two averages of the weights and its
    accuracy; the last pair is that of the result, linearly interpolated. Raise a `RuntimeError` if the target is not
    reached in `max_steps`.
    """
    has_tools = settings.task in tasks.TOOL_TASKS
    model_tokenizer = build_tokenizer(has_tools)
    rows = []
    for row in demonstrations(settings.task, seed=settings.seed)[: settings.max_steps * settings.batch_size]:
        solution = row["solution"]
        turns = solution if isinstance(solution, list) else [{"role": "assistant", "content": solution}]
        rows.append({"prompt": [{"role": "user", "content": row["problem"]}], "completion": turns})
    model = build_model(model_tokenizer, settings.size, settings.seed)
    calibration = None if settings.target_accuracy is None else Calibration(settings, model, model_tokenizer)
    trainer = SFTTrainer(
        model=model,
        processing_class=model_tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[calibration] if calibration else None,
        args=SFTConfig(
            output_dir=str(output_dir),
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            adam_beta2=0.98,
            max_steps=settings.max_steps,
            max_length=None,
            assistant_only_loss=has_tools,  # outputs of tools are not learned
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
    report: dict[str, Any] = {"steps": trainer.state.global_step}
    if calibration:
        if calibration.result is None:
            raise RuntimeError(
                f"The warm start {settings} did not reach target_accuracy (last: {calibration.probed:.3f}). Raise "
                "max_steps, or lower target_accuracy."
            )
        weights, report["calibration"] = calibration.result
        assert trainer.model is not None
        trainer.model.load_state_dict(weights)
    trainer.save_model()
    content = json.dumps({"settings": asdict(settings), **report}, indent=1)
    (Path(output_dir) / "warm_start.json").write_text(content + "\n")
    (Path(output_dir) / "README.md").write_text(CARD)
    return report


class Calibration(TrainerCallback):
    """
    Average the weights, measure the average every `probe_steps` steps, and stop training once it exceeds the target.

    `result` then has weights with the target accuracy on held-out problems, and the (factor, accuracy) pairs of their
    interpolation; `probed` is the last measured accuracy.
    """

    def __init__(self, settings: WarmStartSettings, model: PreTrainedModel, processing_class):
        assert settings.target_accuracy is not None
        self.settings = settings
        self.target = settings.target_accuracy
        # Copied before a trainer prepares the model: accelerate binds `forward` to the original, also in copies.
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE_DECAY))
        self.earlier = [_weights(model)]
        self.processing_class = processing_class
        self.rows = problems(settings.task, "train", settings.num_probes, seed=settings.seed)
        self.held_out = problems(settings.task, "test")
        self.result: tuple[Weights, list[tuple[float, float]]] | None = None
        self.probed = 0.0
        self.num_measurements = 0

    def on_step_end(self, args, state, control, model, **kwargs):
        self.average.update_parameters(model)
        if state.global_step % self.settings.probe_steps and state.global_step != self.settings.max_steps:
            return
        self.probed = measure(self.average.module, self.processing_class, self.rows, seed=self.settings.seed)
        if self.probed >= self.target:
            self.result = self._calibrate()
            control.should_training_stop |= self.result is not None
        # the untrained model, in case that all others exceed the target, and the last few
        self.earlier = self.earlier[:1] + self.earlier[1:][-3:] + [_weights(self.average.module)]

    def _calibrate(self) -> tuple[Weights, list[tuple[float, float]]] | None:
        """Interpolate between the current average and an earlier one by two steps of regula falsi; return `None` if
        the current average is below the target on held-out problems."""
        end = _weights(self.average.module)
        high = (1.0, self._accuracy(end, num_samples=2))
        if high[1] < self.target:
            return None
        for start in reversed(self.earlier):
            low = (0.0, self._accuracy(start, num_samples=2))
            if low[1] < self.target:
                break
            end, high = start, (1.0, low[1])
        else:
            raise ValueError(f"target_accuracy={self.target} must be above that of an untrained model. Raise it.")
        points = [low, high]
        for _ in range(2):
            place = _root(low, high, self.target)
            accuracy = self._accuracy(_between(start, end, place), self.settings.num_calibration_samples)
            points.append((place, accuracy))
            low, high = (points[-1], high) if accuracy < self.target else (low, points[-1])
        place = _root(low, high, self.target)
        return _between(start, end, place), [*points, (place, self.target)]

    def _accuracy(self, weights: Weights, num_samples: int) -> float:
        """Measure the accuracy of these weights on held-out problems with new samples."""
        self.num_measurements += 1
        model: Any = copy.deepcopy(self.average.module)  # torch declares a Module, not the model that it averages
        model.load_state_dict(weights)
        seed = CALIBRATION_SEED + self.num_measurements
        return measure(model, self.processing_class, self.held_out, num_samples=num_samples, seed=seed)


def measure(
    model: PreTrainedModel, processing_class, rows: list[dict[str, str]], *, num_samples: int = 1, seed: int
) -> float:
    """Return the share of correct answers in `num_samples` completions of each problem at temperature 1."""
    rows = sorted(rows, key=lambda row: len(row["problem"]))  # similar lengths within a batch
    requests = [
        Request(str(i), j, sample_seed(seed, str(i), j), [{"role": "user", "content": row["problem"]}])
        for i, row in enumerate(rows)
        for j in range(num_samples)
    ]
    settings = SamplingSettings(temperature=1.0, top_p=1.0, max_new_tokens=MAX_COMPLETION_LENGTH)
    answers = TransformersEngine(model, processing_class, batch_size=512).generate(requests, settings)
    right = [looks_right(rows[int(request.problem_id)], completion.text) for request, completion in answers]
    return sum(right) / len(right)


def _weights(model: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _between(start: Weights, end: Weights, place: float) -> Weights:
    return {name: torch.lerp(value, end[name], place) for name, value in start.items()}


def _root(low: tuple[float, float], high: tuple[float, float], target: float) -> float:
    """Return where the line through two (factor, accuracy) points reaches the target."""
    return low[0] + (high[0] - low[0]) * (target - low[1]) / (high[1] - low[1])


if __name__ == "__main__":
    train_warm_start(WarmStartSettings(**json.loads(sys.argv[1])), sys.argv[2])
