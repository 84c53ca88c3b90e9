"""Additional completions for some prompts of a generation batch, shared by DARS and guidance.

A generation batch starts with `num_generations` completions of each prompt, on the process that has the prompt. All
processes then see all completions and make the same decisions; additional completions are generated in equal shares.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from accelerate.utils import gather_object

from ..pacs_trainer import PACSTrainer
from ..update.rollout import Rollout


# A completion with a label above this is correct.
CORRECT = 0.5

# Metrics of all completions; TRL's others are those of the first completions.
_SHARED_METRICS = ("verification/", "num_tokens")


def known_labels(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the labels of the completions that have one."""
    return [rollout.label for rollout in rollouts if rollout.label == rollout.label]


class ExtendingTrainer(PACSTrainer):
    """
    [`PACSTrainer`] whose generation batches are changed by `extend` before the updates.

    Attributes:
        groups (`dict[int, list[Rollout]]`): Completions of all processes for a generation batch, by prompt.
        inputs (`dict[int, dict]`): Dataset row of each prompt. Both are equal on every process.
    """

    groups: dict[int, list[Rollout]]
    inputs: dict[int, dict]
    source = "first"  # of the completions in tables

    def extend(self, num_steps: int) -> None:
        """Change `groups`, which `num_steps` optimizer steps share. Overrides call it first."""

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        own = {rollout.group: example for rollout, example in zip(rollouts, generation_batch, strict=False)}
        self.inputs = dict(gather_object(list(own.items())))
        self.groups = {group: [] for group in sorted(self.inputs)}
        for rollout in gather_object(rollouts):
            self.groups[rollout.group].append(rollout)
        self.extend(num_steps)
        return self.rollouts_of_groups()

    def rollouts_of_groups(self) -> list[Rollout]:
        return [rollout for rollouts in self.groups.values() for rollout in rollouts]

    def generate_for(self, slots: Sequence[tuple[int, dict]], source: str) -> list[Rollout]:
        """Generate one completion per slot (a group, and the dataset row of the prompt; equal on every process), and
        return those of all processes in this order. `source` names them in tables."""
        if not slots:
            return []
        num_processes = self.accelerator.num_processes
        share = -(-len(slots) // num_processes)
        # Processes generate together, so each needs equally many slots; padding samples are discarded.
        padded = [*slots, *[slots[-1]] * (share * num_processes - len(slots))]
        groups, inputs = zip(*padded[self.accelerator.process_index :: num_processes], strict=True)
        metrics = self._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        self.source = source
        generated = gather_object(self.generate_more(inputs, 1, groups))
        self.source = "first"
        for name in [name for name in metrics if not name.startswith(_SHARED_METRICS)]:
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]
        return [generated[i % num_processes * share + i // num_processes] for i in range(len(slots))]

    def _prepare_generation(self) -> None:
        super()._prepare_generation()
        for name, kept in self._logs.items():  # TRL bounds tables by the number of first completions
            self._logs[name] = deque() if isinstance(kept, deque) else defaultdict(deque)

    def _generate_rollouts(self, generation_batch) -> list[Rollout]:
        for kept in self._logs.values():
            kept.clear()
        return super()._generate_rollouts(generation_batch)

    def _call_reward_functions(self, inputs, *args):
        self._log_completion_extra("source", [self.source] * len(inputs))
        return super()._call_reward_functions(inputs, *args)
