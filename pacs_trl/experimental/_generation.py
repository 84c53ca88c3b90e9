"""Additional completions for some prompts of a generation batch, shared by DARS and guidance.

A generation batch starts with `num_generations` completions of each prompt, on the process that has the prompt. All
processes then see all completions and make the same decisions; additional completions are generated in equal shares.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accelerate.utils import gather_object

from ..pacs_trainer import PACSTrainer
from ..update.rollout import Rollout


CORRECT = 0.5  # a completion with a larger label is correct

# Metrics that also count additional completions; TRL's other metrics describe the first ones.
_SHARED_METRICS = ("verification/", "num_tokens")


def known_labels(rollouts: Sequence[Rollout]) -> list[float]:
    """Return the labels of the completions that have one."""
    return [rollout.label for rollout in rollouts if not math.isnan(rollout.label)]


class ExtendingTrainer(PACSTrainer):
    """
    [`PACSTrainer`] whose generation batches are changed by `extend` before the updates.

    Attributes:
        groups (`dict[int, list[Rollout]]`): Completions of all processes for a generation batch, by
            [`Rollout.group`]; equal on every process.
        examples (`dict[int, dict]`): Dataset row of each group; equal on every process.
        source (`str`): Where the completions that are generated now come from, for tables of completions.
    """

    groups: dict[int, list[Rollout]]
    examples: dict[int, dict]
    source = "first"

    def extend(self, num_steps: int) -> None:
        """Change `groups`, which `num_steps` optimizer steps share. Overrides call it first."""

    def complete_generation(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        process_examples = {rollout.group: row for rollout, row in zip(rollouts, generation_batch, strict=False)}
        self.examples = dict(gather_object(list(process_examples.items())))
        self.groups = {group: [] for group in sorted(self.examples)}
        for rollout in gather_object(rollouts):
            self.groups[rollout.group].append(rollout)
        self.extend(num_steps)
        return self.all_rollouts()

    def all_rollouts(self) -> list[Rollout]:
        """Return the completions of all groups, those of a group adjacent."""
        return [rollout for rollouts in self.groups.values() for rollout in rollouts]

    def generate_for(self, slots: Sequence[tuple[int, dict]], source: str) -> list[Rollout]:
        """Generate one completion per slot (a group, and the dataset row of the prompt; equal on every process), and
        return those of all processes in this order. `source` names them in tables."""
        if not slots:
            return []
        num_processes = self.accelerator.num_processes
        # Processes generate together, so each needs equally many slots; padding samples are discarded.
        slots_per_process = -(-len(slots) // num_processes)
        padding = [slots[-1]] * (slots_per_process * num_processes - len(slots))
        process_slots = [*slots, *padding][self.accelerator.process_index :: num_processes]
        groups, examples = zip(*process_slots, strict=True)
        num_logged = {name: len(values) for name, values in self._metrics["train"].items()}
        with self._from_source(source):
            generated = gather_object(self.generate_more(examples, 1, groups))
        self._drop_metrics_after(num_logged)
        # Slot `i` is the `i // num_processes`-th one of process `i % num_processes`.
        return [generated[i % num_processes * slots_per_process + i // num_processes] for i in range(len(slots))]

    @contextmanager
    def _from_source(self, source: str) -> Iterator[None]:
        """Name the completions that are generated inside the context in tables."""
        self.source = source
        try:
            yield
        finally:
            self.source = "first"

    def _drop_metrics_after(self, num_logged: dict[str, int]) -> None:
        """Drop the values of metrics that came after the first `num_logged`, unless they count all completions."""
        metrics = self._metrics["train"]
        for name in list(metrics):
            if name.startswith(_SHARED_METRICS):
                continue
            del metrics[name][num_logged.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]

    def _set_up_generation(self) -> None:
        super()._set_up_generation()
        for name, column in self._logs.items():  # TRL bounds tables by the number of first completions
            self._logs[name] = deque() if isinstance(column, deque) else defaultdict(deque)

    def _generate_rollouts(self, generation_batch) -> list[Rollout]:
        for column in self._logs.values():
            column.clear()
        return super()._generate_rollouts(generation_batch)

    def _call_reward_functions(self, inputs, *args):
        self._log_completion_extra("source", [self.source] * len(inputs))
        return super()._call_reward_functions(inputs, *args)
