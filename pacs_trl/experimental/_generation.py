"""Additional completions for some prompts of a generation batch, shared by DARS and guidance.

A generation batch starts with `num_generations` completions of each prompt, on the process that has the prompt. All
processes then see all completions and make the same decisions; additional completions are generated in equal shares.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from ..pacs_trainer import PACSTrainer
from ..update.rollout import Rollout


# A completion with a label above this is correct.
CORRECT = 0.5

# Metrics of additional completions that get a name of their own; TRL's are those of the first completions.
_OWN_METRICS = {"reward": "reward", "completions/mean_length": "mean_length"}
# Metrics of all completions.
_SHARED_METRICS = ("verification/", "num_tokens")


class Generation:
    """The completions of all processes for one generation batch by prompt (`groups`), and the dataset row of each
    prompt (`inputs`), equal on every process."""

    def __init__(self, trainer, generation_batch: Sequence[dict[str, Any]], rollouts: list[Rollout]):
        self.trainer = trainer
        self.num_processes, self.process = trainer.accelerator.num_processes, trainer.accelerator.process_index
        own = {rollout.group: example for rollout, example in zip(rollouts, generation_batch, strict=False)}
        self.inputs: dict[int, dict] = dict(gather_object(list(own.items())))
        self.groups: dict[int, list[Rollout]] = {group: [] for group in sorted(self.inputs)}
        for rollout in gather_object(rollouts):
            self.groups[rollout.group].append(rollout)

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups.values() for rollout in group]

    def generate(self, slots: Sequence[tuple[int, dict]], source: str) -> list[Rollout]:
        """Generate one completion per slot (a group, and the dataset row of the prompt; equal on every process), and
        return those of all processes in this order. `source` is the prefix of metrics, and in tables."""
        if not slots:
            return []
        share = -(-len(slots) // self.num_processes)
        # Processes generate together, so each needs equally many slots; padding samples are discarded.
        padded = [*slots, *[slots[-1]] * (share * self.num_processes - len(slots))]
        groups, inputs = zip(*padded[self.process :: self.num_processes], strict=True)
        metrics = self.trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        self.trainer.source = source
        generated = gather_object(self.trainer.generate_more(inputs, 1, groups))
        self.trainer.source = "first"
        for name in [name for name in metrics if not name.startswith(_SHARED_METRICS)]:
            values, known = metrics.pop(name), before.get(name, 0)
            if name in _OWN_METRICS:
                metrics[f"{source}/{_OWN_METRICS[name]}"] += values[known:]
            if known:
                metrics[name] = values[:known]
        return [generated[i % self.num_processes * share + i // self.num_processes] for i in range(len(slots))]

    def log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(float(value))


def known_labels(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the labels of the completions that have one."""
    return [rollout.label for rollout in rollouts if rollout.label == rollout.label]


class ExtendingTrainer(PACSTrainer):
    """[`PACSTrainer`] whose generation batches are changed by `extend` before the updates."""

    source = "first"  # of the completions in tables

    def extend(self, generation: Generation, num_steps: int) -> None:
        """Change a generation batch, which `num_steps` optimizer steps share. Overrides call it first."""

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        generation = Generation(self, generation_batch, rollouts)
        self.extend(generation, num_steps)
        return generation.rollouts

    def _prepare_generation(self) -> None:
        super()._prepare_generation()
        for name, kept in self._logs.items():  # TRL bounds tables by the number of first completions
            self._logs[name] = deque() if isinstance(kept, deque) else defaultdict(deque)

    def _generate_rollouts(self, generation_batch) -> list[Rollout]:
        for kept in self._logs.values():
            kept.clear()
        return super()._generate_rollouts(generation_batch)

    def _generate_and_score_completions(self, inputs):
        self._log_completion_extra("source", [self.source] * len(inputs))
        return super()._generate_and_score_completions(inputs)
