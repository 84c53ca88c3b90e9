"""Sweep of rollout reuse: K updates on each rollout, beta, class weights, and learning rate.

`python -m experiments.reuse`

A cell has 40 rollouts of 128 completions (16 prompts x 8) or 60 of 256. The cells of a seed share warm start and
prompts. GRPO clips its ratio (epsilon 0.2); RLOO neither clips nor divides by the standard deviation. Recorded are
held-out problems solved in 16 samples each, before and after; per rollout the reward, the entropy, and CPU seconds of
generation and updates; and per position of an update in a rollout the mean movement of the log-ratios and the force
that is left (see `reuse_trainers.py`), over the rollouts after the first quarter.

Cells are trained in the order of STAGES. Recorded cells are skipped, and an interrupted cell starts again.
`reuse_tables.py` prints the tables.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from experiments.paper.records import Records, Run, record
from experiments.paper.render import Cell
from experiments.reuse_trainers import DelayedGRPO, DelayedPACS, MeasuredGRPO, MeasuredPACS, delayed


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/reuse"
ROLLOUTS, COMPLETIONS = 40, 128
TASKS = {  # warm start, problems, tokens of a completion
    "addition": ("addition/tiny", "addition", 32),
    "larger": ("addition/small", "addition", 32),
    "sums": ("arithmetic/tiny", "terms", 72),
    "equation": ("equation/tiny", "equation", 40),
}
LIMITS = {"PACS": "pacs/saturated_score_fraction", "GRPO": "clip_ratio/region_mean", "RLOO": "clip_ratio/region_mean"}
KS = (1, 4, 16)


class Arm(NamedTuple):
    """A cell of the sweep."""

    method: str  # a key of LIMITS
    updates: int = 1  # K
    beta: float = 1.0
    weights: str = "balanced"
    rate: float = 1e-4
    task: str = "addition"
    minibatches: int = 1  # of a rollout, each with an update of its own
    delay: int | None = None  # updates since the rollout's policy
    correct: bool = True
    reference: str = "rollout"
    rollouts: int = ROLLOUTS
    completions: int = COMPLETIONS  # of a rollout
    engine: str = "transformers"  # which draws them

    @property
    def name(self) -> str:
        own = f"beta{self.beta:g}-{self.weights}-" if self.method == "PACS" else ""
        late = "" if self.delay is None else f"-delay{self.delay}-{'then' if self.correct else 'now'}"
        parts = f"-parts{self.minibatches}" if self.minibatches > 1 else ""
        reference = f"-{self.reference}" if self.reference != "rollout" else ""
        sizes = self.rollouts, self.completions
        large = "" if sizes == (ROLLOUTS, COMPLETIONS) else f"-{self.rollouts}x{self.completions}"
        last = parts + late + reference + large + ("-vllm" if self.engine == "vllm" else "")
        return f"{self.task}/{self.method.lower()}-k{self.updates}-{own}{self.rate:g}{last}"

    @property
    def cell(self) -> Cell:
        model, dataset, length = TASKS[self.task]
        settings: dict[str, Any] = {
            "model_name_or_path": f"miniature/{model}",
            "dataset_name": f"miniature/{dataset}",
            "max_completion_length": length,
            "per_device_train_batch_size": self.completions // self.minibatches,
            "steps_per_generation": self.minibatches,
            "num_iterations": self.updates,
            "max_steps": self.rollouts * self.updates * self.minibatches,
            "learning_rate": self.rate,
        }
        if self.engine == "vllm":
            settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}
        if self.method == "PACS":
            settings |= {"pacs_beta": self.beta, "class_weighting": self.weights, "reference": self.reference}
        elif self.method == "RLOO":
            settings |= {"epsilon": 1e6, "scale_rewards": "none"}
        return Cell(
            self.name, f"miniature/{'pacs' if self.method == 'PACS' else 'grpo'}", settings=settings, name=self.name
        )

    @property
    def trainer_class(self) -> type:
        measured, late = (MeasuredPACS, DelayedPACS) if self.method == "PACS" else (MeasuredGRPO, DelayedGRPO)
        return measured if self.delay is None else delayed(late, self.delay, correct=self.correct)


LARGE = {"rollouts": 60, "completions": 256}
LEADING = [("GRPO", 1.0), ("PACS", 1.0), ("PACS", 10.0)]


def _leading(updates: Sequence[int], rate: float = 1e-4, **settings: Any) -> list[Arm]:
    return [Arm(method, k, beta, rate=rate, **settings) for k in updates for method, beta in LEADING]


STAGES: dict[str, list[Arm]] = {
    "eight": [*_leading([8]), Arm("RLOO", 8), Arm("PACS", 8, 30.0), Arm("PACS", 8, 3.0)],
    "one": [*_leading([1], 3e-4), *_leading([1])],
    "four": _leading([4]),
    "large": [
        *(Arm(method, k, beta, **LARGE) for k in (8, 4) for method, beta in (LEADING[0], LEADING[2])),
        *_leading([1], 3e-4, **LARGE)[:2],
    ],
    "large-more": [Arm("PACS", 4, **LARGE), Arm("PACS", 8, 3.0, **LARGE)],
    "delays": [
        Arm(method, 1, beta, rate=3e-4, delay=delay, correct=correct)
        for delay in (8, 2, 4, 1)
        for method, beta, correct in (
            ("GRPO", 1.0, True),
            ("GRPO", 1.0, False),
            ("PACS", 1.0, True),
            ("PACS", 1.0, False),
            ("PACS", 10.0, True),
        )
    ],
    "sixteen": _leading([16], 3e-5) + [Arm("PACS", 16, 30.0, rate=3e-5)],
    "rates": [*_leading([8], 3e-5), *_leading([4, 8], 3e-4), *_leading([1], 1e-3)[:2]],
    "sums": _leading([8], task="sums") + _leading([1], 3e-4, task="sums")[:2],
    "equation": _leading([8], task="equation") + _leading([1], 3e-4, task="equation")[:2],
    "weights": [Arm("PACS", 8, beta, "none") for beta in (1.0, 10.0)],
    "parts": [Arm(method, beta=beta, minibatches=4) for method, beta in LEADING],
    "critic": [Arm("PACS", beta=beta, rate=3e-4, reference="snapshot") for beta in (1.0, 10.0)],
    "two": _leading([2]),
    "vllm": [
        Arm(method, k, beta, engine="vllm")
        for k, (method, beta) in ((1, LEADING[0]), (1, LEADING[1]), (8, LEADING[0]), (8, LEADING[2]))
    ],
    "larger": _leading([1], 3e-4, task="larger") + _leading([8], task="larger"),
    "more": [
        Arm("RLOO", rate=3e-4),
        Arm("RLOO", 4),
        *(Arm("PACS", 4, beta) for beta in (3.0, 30.0)),
        *_leading([16]),
    ],
}


def evaluation_settings(task: str) -> dict[str, Any]:
    _, problems, length = TASKS[task]
    return {
        "benchmarks": f"miniature/{problems}",
        "n": max(KS),
        "k": list(KS),
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": length,
        "prompt_instruction": "",
        "engine": "transformers",
        "batch_size": 512,
    }


def run(arm: Arm | None, task: str, seed: int, results_dir: Path, work_dir: Path, short: bool = False) -> None:
    """Train, measure, and record an arm with one seed (`None`: measure the warm start), unless it is recorded."""
    from experiments.paper.runs import start_of, train_once
    from pacs_trl.evaluation.arguments import EvaluationArguments
    from pacs_trl.evaluation.run import evaluate
    from pacs_trl.recipe import read_recipe
    from pacs_trl.rewards import shared_verifier
    from pacs_trl.rollouts import rollout_trainer
    from pacs_trl.rollouts.timing import StepTimer

    cell = (arm or Arm("PACS", task=task)).cell
    name = cell.run if arm else f"{task}/start"
    words = ["--config", str(ROOT / f"recipes/{cell.recipe}.yaml"), *cell.words, "--seed", str(seed)]
    words += ["--max_steps", "2"] if short else []
    recipe = read_recipe(words)
    evaluation = evaluation_settings(task) | {"max_problems": 4 if short else 250}
    own = {key: value for key, value in recipe.settings.items() if key not in ("seed", "output_dir")} if arm else None
    settings = {"training": own, "evaluation": evaluation}
    records = Records(results_dir)
    records.require_same_settings(name, settings)
    if seed in records.seeds(name):
        return
    start = start_of(recipe, **({"max_steps": 2, "target_accuracy": None} if short else {}))
    work, model, training = work_dir / name / f"seed-{seed}", start, None
    if arm:
        rollout_trainer.StepTimer = partial(StepTimer, time.process_time)
        if arm.engine == "vllm":
            from benchmarks.shared_engine import share_engine

            share_engine("cpu", "float32")
        model = work / "model"  # kept: `ranking.py` scores with it
        history = train_once(words, start, model, arm.trainer_class)
        training = summary(history, arm.updates * arm.minibatches, LIMITS[arm.method])
    arguments = EvaluationArguments(model=str(model), output_dir=str(work / "evaluation"), method=name, **evaluation)
    results = evaluate(arguments, shared_verifier(), progress=False)
    record(results_dir, name, Run(seed, results, {}, training), settings)


def summary(history: Sequence[dict[str, Any]], per_rollout: int, stopped: str) -> dict[str, Any]:
    """Return the recorded quantities of a run, see the module docstring, in the form of a [`Run`]."""
    logs = [log for log in history if "reuse/moved" in log]
    rollouts = [logs[i : i + per_rollout] for i in range(0, len(logs), per_rollout)]
    drawing, learning, kept = 0.0, 0.0, []
    for number, own in enumerate(rollouts):
        seconds = sum(log[f"time/{part}"] for log in own for part in ("log_probs", "update", "optimizer"))
        learning, drawing = learning + seconds, drawing + sum(log["time/total"] for log in own) - seconds
        first = {"reward": own[0]["reward"], "entropy": own[0]["entropy"], "drawing": drawing, "learning": learning}
        kept.append({"step": number} | {key: round(value, 4) for key, value in first.items()})
    settled = rollouts[len(rollouts) // 4 :]
    places = {"gap": "reuse/gap", "moved": "reuse/moved", "force": "reuse/force", "stopped": stopped}
    for key, name in places.items():
        for place in range(per_rollout):
            values = [own[place][name] for own in settled if name in own[place] and math.isfinite(own[place][name])]
            if values:
                kept.append({"step": place, key: round(mean(values), 5)})
    return {"log_history": kept, "checkpoints": [], "curves": ["reward", "entropy", "drawing", "learning", *places]}


def plan(stages: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[Arm | None, str, int]]:
    """Return the arms (or `None` for the warm start), tasks, and seeds in order."""
    for seed in seeds:
        for stage in stages:
            for task in dict.fromkeys(arm.task for arm in STAGES[stage]):
                yield None, task, seed
            for arm in STAGES[stage]:
                yield arm, arm.task, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--stages", nargs="+", choices=list(STAGES), default=[name for name in STAGES if name != "vllm"]
    )
    parser.add_argument("--results_dir", type=Path, default=RESULTS)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/reuse"))
    parser.add_argument("--short", action="store_true", help="two updates and four problems, to try things out")
    args = parser.parse_args()
    for arm, task, seed in plan(args.stages, args.seeds):
        run(arm, task, seed, args.results_dir, args.work_dir, args.short)
        print(arm.name if arm else f"{task}/start", seed, flush=True)


if __name__ == "__main__":
    main()
