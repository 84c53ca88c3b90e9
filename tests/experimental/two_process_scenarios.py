"""Scenarios of `test_related_methods_on_two_processes.py`; see `support/two_processes.py`."""

from functools import partial

from support.long_way import CORRECTION
from support.related_methods import DarsAndGuidanceTrainer, SteerAndVerlTrainer
from support.rollouts import addition_dataset, boxed
from support.runs import build_trainer
from support.sharding import FSDP_SETTINGS, zero3_settings
from support.two_processes import HALF, QUARTER, Sampled, record, resumed

from pacs_trl.experimental.process_labels import ProcessLabelsTrainer
from pacs_trl.experimental.rlpr import RLPRTrainer, probability_reward
from pacs_trl.experimental.steer import STEERTrainer
from pacs_trl.experimental.ucpo import UCPOTrainer


REPLAYED: dict[str, tuple[dict, dict]] = {  # settings, settings of the replay
    "STEER": ({**QUARTER, "trainer_class": STEERTrainer, "token_weight_min": 0.5, "max_steps": 4}, {}),
    "labels in several places": (
        {**QUARTER, "trainer_class": ProcessLabelsTrainer, "group_layout": "split", "max_steps": 4},
        {"steps": True},
    ),
}
# STEER, VERL, and the mismatch correction
WEIGHTED = HALF | CORRECTION | {"trainer_class": SteerAndVerlTrainer, "token_weight_mapping": "linear", "max_steps": 4}
WEIGHTED |= {"hidden_state_stride": 2, "group_layout": "split"}


def replayed(rank, directory, name, **how):
    settings, replay = REPLAYED[name]
    return record(directory, {**settings, **how}, replay)


def weighted(rank, directory, **how):
    return record(directory, WEIGHTED | how, {}, replay_class=Sampled)


def improbable(rank, directory, **how):
    """Completions of a group are on both processes."""
    settings = HALF | {"trainer_class": UCPOTrainer, "tau": 1.0, "num_generations": 8, "max_steps": 4}
    return record(directory, settings | how, {"num_generations": 8})


def drawn_where_needed(rank, directory, **how):
    """The prompts of one process are nearly never solved without a hint; both draw for them."""
    drawn = []

    class Watched(DarsAndGuidanceTrainer):
        def generate_more(self, inputs, num_generations, groups=None):
            rows = super().generate_more(inputs, num_generations, groups)
            drawn.append((self.state.global_step, [row.group for row in rows]))
            return rows

    def reward(prompts, completion_ids, place, **kwargs):
        hard = [i % 4 >= 2 and "Hint" not in str(prompt) for i, prompt in zip(place, prompts)]
        return [float(sum(ids) % (19 if is_hard else 2) == 0) for ids, is_hard in zip(completion_ids, hard)]

    # 4 prompts in a generation, the last two of the second process
    data = addition_dataset(8).map(lambda row, i: {"place": i, "hint": "Count."}, with_indices=True)
    settings = {"adaptive_rollouts": "hardness_weighted", "max_generations": 16, "adaptive_rollouts_budget": 22}
    settings |= {"guidance": "hint", "refill_uniform_groups": True, "max_refill_rounds": 1, "shuffle_dataset": False}
    settings |= HALF | {"max_steps": 4, "trainer_class": Watched} | how
    more = {"train_dataset": data}
    return resumed(rank, directory, more=more, reward=reward, steps=(1, 2), **settings) | {"drawn": drawn}


def probabilities(rank, directory, **how):
    """Of reference answers, of the whole training set and of completions, which the processes share."""
    settings = {"max_completion_length": 12, "per_device_train_batch_size": 4, "learning_rate": 0.5} | how
    trainer = build_trainer(
        directory, reward=probability_reward, trainer_class=RLPRTrainer, more={"rollout_func": boxed}, **settings
    )
    trainer.train()
    logs = [
        {k: v for k, v in e.items() if k.startswith("probability/")} for e in trainer.state.log_history if "loss" in e
    ]
    return {"without": trainer._without_reasoning, "logs": logs}


GENERATING = {"probabilities": probabilities, "drawn where needed": drawn_where_needed}
DDP = (
    {name: partial(replayed, name=name) for name in REPLAYED}
    | {"weighted": weighted, "improbable": improbable}
    | GENERATING
)
FSDP2 = {name: partial(scenario, **FSDP_SETTINGS) for name, scenario in DDP.items()}
ZERO3 = {name: partial(scenario, **zero3_settings(0)) for name, scenario in DDP.items() if name not in GENERATING}
SCENARIOS = {"ddp": DDP, "fsdp2": FSDP2, "zero3": ZERO3}
