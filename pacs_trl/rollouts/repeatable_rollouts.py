"""Continuous rollouts that repeat: an engine process decodes while the trainer learns, and nothing depends on time.

Weights are replaced at a count of groups. When the groups of optimizer step `n` are finished, the engine stops, gets
the weights from before step `n`, and decodes until the groups of step `n + 1` are finished, while the trainer runs
step `n`. So tokens of the groups of step `n + 1` have version `n`, and earlier versions where a group was in progress
for longer. Groups start when weights are replaced: as many as the steps need in which the new version may be trained.
Which token has which version follows from seed and settings, so two runs end with equal weights.

Between two calls of the engine all state is in the groups in progress (`stepped_engine.py`). A checkpoint waits for
the generation in flight and contains it, so that a run that resumes ends with these weights, too.
"""

from collections.abc import Callable
from typing import Any

from ..update.step_sizes import BatchSizes
from .late_batches import Generated, LateBatches
from .prompt_order import indices_of_generation
from .protocols import LateTrainer
from .reward_functions import independent_copy
from .stepped_engine import GroupInProgress


_GROUPS = ("started", "finished", "others")  # entries of a batch


class RepeatableRollouts(LateBatches):
    """
    Source of rollouts of a run with `rollout_schedule: continuous` and an engine process. Batch `n` is that of
    optimizer step `n`, and is generated with a lag of one. Its entries are those of [`LateBatches`], and:

    - `finished`, `others` (`list[GroupInProgress]`): The groups of the step, in the order in which they finished, and
      those that go on, in the order of positions. A batch of `stopped` has `started` instead: all groups that it is
      generated with; that behind the last step, which is never generated, has the `others` that a longer run goes on
      with.
    - `next_position` (`int`): First position whose group has not started.
    - `num_dropped` (`int`): Groups that were dropped before the batch, because they were too old for it.
    """

    def __init__(self, trainer: LateTrainer):
        super().__init__(trainer)
        self.lag = 1
        self.groups_per_step = trainer.args.generation_batch_size // trainer.num_generations
        self._start_of_batch: dict[str, Any] = {}  # `started` and more of the batch in flight
        self._indices: dict[int, list[int]] = {}  # of dataset rows, by the number of a batch of prompts

    # Rollouts of a step ---------------------------------------------------------------------------------------------

    def next_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait for the groups of the next optimizer step, and return the dataset rows of their completions. Groups
        come in the order in which they were finished, so of `rows` only the number is used."""
        number = self.next_number
        self._take_next()
        groups = self.taken["finished"]
        ages = [group.staleness(number) for group in groups]
        completion_versions = [versions for group in groups for versions in group.versions]
        metrics = {
            "lag_updates": sum(ages) / len(ages),
            "largest_lag": float(max(ages)),
            "dropped_groups": float(self.taken["num_dropped"]),
            "waiting_groups": float(sum(group.is_finished for group in self.taken["others"])),
            "changed_weights_fraction": sum(len(set(v)) > 1 for v in completion_versions) / len(rows),
        }
        self.trainer.record_metrics({f"async/{name}": value for name, value in metrics.items()})
        return _per_completion(groups, {group.position: self._row(group.position) for group in groups})

    def take(self, prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the completions of the rows of [`next_rows`], whose prompts are `prompts`."""
        self._check_prompts(prompts)
        return self.taken["output"]

    # Generation -----------------------------------------------------------------------------------------------------

    def _prepare(self, number: int, weights_step: int, stopped: dict[str, Any]) -> Callable[[], Generated]:
        start = self._start_of_batch = self._start_groups(number, stopped or self.taken)
        stream = f"{self.trainer.args.seed}/continuous/{number}"
        rows = {group.position: self._row(group.position) for group in start["started"]}

        def generate() -> Generated:
            finished, others = self.engine.decode(0, start["started"], self.groups_per_step, weights_step, stream)
            entries = {
                "prompts": [group.prompt_ids for group in finished for _ in group.completion_ids],
                "output": {
                    "completion_ids": [list(ids) for group in finished for ids in group.completion_ids],
                    "logprobs": [list(logps) for group in finished for logps in group.logps],
                },
                "finished": finished,
                "others": others,
                "next_position": start["next_position"],
                "num_dropped": start["num_dropped"],
            }
            return Generated(entries, _per_completion(finished, rows))

        return generate

    def _start_groups(self, number: int, before: dict[str, Any]) -> dict[str, Any]:
        """Return the groups that a batch is generated with, in the order of positions: those that the batch `before`
        has left in progress, if they are not too old, and new ones. `before` may be the batch itself, stopped."""
        if "started" in before:
            return {name: before[name] for name in ("started", "next_position", "num_dropped")}
        trainer, args = self.trainer, self.trainer.args
        groups, next_position = before.get("others", []), before.get("next_position", 0)
        fresh = [group for group in groups if group.staleness(number) <= args.max_staleness]
        sizes = BatchSizes.of(args, trainer.accelerator.num_processes)
        num_steps = sizes.num_generation_batches(trainer.state.max_steps)
        last_step = min(trainer.state.global_step + args.max_staleness, num_steps - 1)  # of new groups, at the latest
        num_new = max(0, (last_step - number + 1) * self.groups_per_step - len(fresh))
        positions = list(range(next_position, next_position + num_new))
        prompts = self._prompt_ids([self._row(position)["prompt"] for position in positions]) if positions else []
        new = [
            GroupInProgress.start(position, prompt_ids, trainer.num_generations)
            for position, prompt_ids in zip(positions, prompts, strict=True)
        ]
        return {
            "started": [*fresh, *new],
            "next_position": next_position + num_new,
            "num_dropped": len(groups) - len(fresh),
        }

    def _row(self, position: int) -> dict[str, Any]:
        """Return the dataset row of a position. Prompts come in the order of `rollout_schedule: batch`."""
        number, i = divmod(position, self.groups_per_step)
        if number not in self._indices:
            indices = indices_of_generation(self.trainer, number)
            self._indices[number] = indices[:: self.trainer.num_generations]
        return self.trainer.train_dataset[self._indices[number][i]]

    # State ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[int, dict[str, Any]]:
        batches = super().state()
        for number in self._in_flight.keys() & batches.keys():
            batches[number] |= self._start_of_batch
        if not batches and "others" in self.taken:  # after the last step, for a run that goes on with more of them
            batches[self.next_number] = {name: self.taken[name] for name in ("others", "next_position")}
        return _with_groups(batches, lambda group: dict(vars(group)))

    def load(self, batches: dict[int, dict[str, Any]]) -> None:
        super().load(_with_groups(batches, lambda group: GroupInProgress(**group)))


def _per_completion(groups: list[GroupInProgress], rows: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a dataset row for each completion of groups, from the rows by position."""
    return [independent_copy(rows[group.position]) for group in groups for _ in group.completion_ids]


def _with_groups(batches: dict[int, dict[str, Any]], convert: Callable[[Any], Any]) -> dict[int, dict[str, Any]]:
    """Return batches with each of their groups converted: checkpoints hold plain values."""
    converted = {}
    for number, batch in batches.items():
        groups = {name: [convert(group) for group in batch[name]] for name in _GROUPS if name in batch}
        converted[number] = batch | groups
    return converted
