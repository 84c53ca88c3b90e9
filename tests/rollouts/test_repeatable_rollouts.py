"""Continuous rollouts in the engine process: groups, versions of tokens, and weights follow from settings alone.

vLLM's engine is scripted here. With a real one they are tested in tests/vllm_cpu.
"""

import threading

import pytest
from support.models import LORA, assert_same_models, tiny_model
from support.rollouts import addition_dataset
from support.runs import Recorder, build_trainer, config
from support.scripted_engine import SteppedVLLM, fingerprint, params_of, play_engine
from transformers import TrainerCallback

from pacs_trl import GRPOConfig, GRPOTrainer, PACSTrainer
from pacs_trl.errors import FailedRun, UserError
from pacs_trl.rollouts import late_batches
from pacs_trl.rollouts.stepped_engine import GroupInProgress, decode


STALENESS = 3
SETTINGS = {
    "rollout_schedule": "continuous",
    "rollout_engine": "vllm",
    "max_staleness": STALENESS,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 6,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
}


class Taken(TrainerCallback):
    """The groups that each optimizer step has trained."""

    def __init__(self):
        self.groups: list[list[GroupInProgress]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.groups.append(self.trainer._source.taken["finished"])

    @property
    def positions(self) -> list[list[int]]:
        return [[group.position for group in groups] for groups in self.groups]


@pytest.fixture
def engine(monkeypatch):
    """The class of engines of this test."""
    return play_engine(monkeypatch.setattr)


def trainer_of(directory, callbacks=(), trainer_class=GRPOTrainer, **settings):
    taken = Taken()
    more = {"train_dataset": addition_dataset(12), "callbacks": [taken, *callbacks]}
    settings = SETTINGS | settings
    trainer = build_trainer(directory, model=tiny_model(), trainer_class=trainer_class, more=more, **settings)
    taken.trainer = trainer
    return trainer, taken


def values(trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def groups_of(num_groups: int) -> list[GroupInProgress]:
    return [GroupInProgress.start(position, [position], num_generations=2) for position in range(num_groups)]


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [len]}, "tools"),
        ({"rollout_func": print}, "a rollout_func"),
        ({"peft_config": LORA}, "adapters with rollout_engine: vllm"),
        ({"train_dataset": addition_dataset(12).to_iterable_dataset()}, "a streaming dataset"),
    ],
    ids=["tools", "rollout function", "adapter", "stream"],
)
def test_what_the_engine_process_lacks_is_refused_before_the_model_is_loaded(tmp_path, engine, more, words):
    with pytest.raises(UserError, match=f"rollout_schedule: continuous does not support {words}. Remove rollout_sch"):
        build_trainer(tmp_path, model="no/model", trainer_class=GRPOTrainer, more=more, **SETTINGS)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda args: 2))
    with pytest.raises(UserError, match="is for one process, and there are 2. Launch one"):
        config(tmp_path, GRPOConfig, **SETTINGS)


# The engine ---------------------------------------------------------------------------------------------------------


def test_groups_that_finish_first_in_steps_of_the_engine_are_first_and_ties_have_the_order_of_positions():
    lengths = {0: [9, 1], 1: [2, 4], 2: [4, 4], 3: [3, 1]}
    groups, engine = groups_of(4), SteppedVLLM(lambda position, index: lengths[position][index])
    assert [g.position for g in decode(engine, groups, 1, 0, "first", params_of)] == [3]
    assert engine.num_steps == 3
    assert not engine.requests
    others = [group for group in groups if group.position != 3]
    assert [g.position for g in decode(engine, others, 1, 1, "second", params_of)] == [1]  # and 2, which waits
    assert engine.num_steps == 4
    assert [g.position for g in decode(engine, [groups[0], groups[2]], 1, 2, "third", params_of)] == [2]
    assert engine.num_steps == 4
    assert groups[2].versions == [[0, 0, 0, 1]] * 2
    assert groups[0].versions == [[0, 0, 0, 1], [0]]
    assert groups[0].ended == [False, True]
    assert groups[0].staleness(5) == 5


def test_a_completion_goes_on_after_all_its_tokens_with_another_seed():
    groups, engine, requests = groups_of(2), SteppedVLLM(lambda position, index: 1 + 2 * position), []
    add = engine.add_request
    engine.add_request = lambda *request: requests.append(request) or add(*request)
    decode(engine, groups, 1, 0, "first", params_of)
    tokens = [ids[0] for ids in groups[1].completion_ids]
    decode(engine, groups[1:], 1, 1, "second", params_of)
    assert [name for name, *_ in requests] == ["0/0", "0/1", "1/0", "1/1", "1/0", "1/1"]
    assert [prompt["prompt_token_ids"] for _, prompt, _ in requests[2:]] == [[1], [1], [1, tokens[0]], [1, tokens[1]]]
    assert [params.num_tokens for *_, params in requests] == [0, 0, 0, 0, 1, 1]
    assert len({params.seed for *_, params in requests}) == 6
    assert [len(ids) for ids in groups[1].completion_ids] == [3, 3]


# Runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, pytest.param(PACSTrainer, marks=pytest.mark.slow)])
def test_each_token_has_the_version_of_the_weights_that_sampled_it(tmp_path, engine, trainer_class):
    """The update refers to the engine's log-probs. No group is older than the largest staleness, or trained twice."""
    recorder, rollouts = Recorder(), []
    trainer, taken = trainer_of(tmp_path, [recorder], trainer_class, save_strategy="no", max_steps=8)
    generate = trainer._generate_rollouts
    trainer._generate_rollouts = lambda inputs: rollouts.append(generate(inputs)) or rollouts[-1]
    trainer.train()
    fingerprints = [fingerprint(weights) for weights in recorder.weights]
    assert len(set(fingerprints)) == 8
    (name,) = trainer.update.logps_of_generating_policy
    ages, num_mixed = [], 0
    for step, groups in enumerate(taken.groups):
        assert len(groups) == 2
        ages += [group.staleness(step) for group in groups]
        completions = [(group, i) for group in groups for i in range(4)]
        for (group, i), rollout in zip(completions, rollouts[step], strict=True):
            assert rollout.completion_ids.tolist() == group.completion_ids[i]
            assert group.versions[i] == sorted(group.versions[i])
            assert group.logps[i] == [fingerprints[version] for version in group.versions[i]]
            assert getattr(rollout, name) == pytest.approx(group.logps[i])
            num_mixed += len(set(group.versions[i])) > 1
    assert num_mixed > 0
    assert max(ages) == STALENESS
    assert values(trainer, "async/largest_lag") == [max(ages[2 * step :][:2]) for step in range(8)]
    assert sum(values(trainer, "async/changed_weights_fraction")) * 8 == pytest.approx(num_mixed)
    positions = sum(taken.positions, [])
    assert positions != sorted(positions)
    assert len(set(positions)) == 16
    assert [call.version for call in engine.calls] == [0, 0, 1, 2, 3, 4, 5, 6]


def test_groups_of_equal_length_come_in_the_order_of_batches(tmp_path, engine):
    """Generation runs ahead by the largest staleness, and starts no group that no step will train."""
    engine.length = staticmethod(lambda position, index: 5)
    trainer, taken = trainer_of(tmp_path, num_train_epochs=1, max_steps=-1, save_strategy="no")
    trainer.train()
    assert taken.positions == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [call.positions[-1] + 1 for call in engine.calls] == [8, 8, 10, 12, 12, 12]
    assert values(trainer, "async/dropped_groups") == [0] * 6
    assert values(trainer, "async/waiting_groups") == [2, 0, 2, 0, 2, 0]  # four groups are decoded at a time
    assert values(trainer, "async/largest_lag") == [0, 1, 1, 2, 1, 2]


def test_groups_that_are_too_old_are_dropped_and_counted_and_their_prompts_not_repeated(tmp_path, engine):
    engine.length = staticmethod(lambda position, index: 1000 if position in (1, 5) else 4)
    trainer, taken = trainer_of(tmp_path, max_steps=8, save_strategy="no")
    trainer.train()
    # Both have a token of the first weights, so the steps 0 to 3 may train them, and the next batch drops them.
    assert values(trainer, "async/dropped_groups") == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sorted(sum(taken.positions, [])) == [position for position in range(18) if position not in (1, 5)]
    assert max(values(trainer, "async/largest_lag")) <= STALENESS


@pytest.mark.parametrize("max_staleness", [pytest.param(1, marks=pytest.mark.slow), STALENESS])
def test_two_runs_and_resumed_ones_end_with_equal_bits(tmp_path, engine, max_staleness):
    first, groups = trainer_of(tmp_path / "first", max_staleness=max_staleness)
    first.train()
    second, groups_of_second = trainer_of(tmp_path / "second", max_staleness=max_staleness)
    second.train()
    assert plain(groups_of_second.groups) == plain(groups.groups)
    assert_same_models(first, second)
    for step in (1, 4):
        resumed, groups_of_resumed = trainer_of(tmp_path / f"resumed-{step}", max_staleness=max_staleness)
        resumed.train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{step}"))
        assert plain(groups_of_resumed.groups) == plain(groups.groups[step:])
        assert_same_models(first, resumed)


def plain(steps: list[list[GroupInProgress]]) -> list:
    return [[vars(group) for group in groups] for groups in steps]


def test_a_run_that_is_stopped_while_the_engine_decodes_resumes_with_equal_bits(tmp_path, engine, monkeypatch):
    """Its checkpoint has the weights of the generation in flight, and the groups with which it began."""
    straight, _ = trainer_of(tmp_path / "straight", save_strategy="no")
    straight.train()
    monkeypatch.setattr(late_batches, "PATIENCE", 0.1)
    goes_on = threading.Event()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                control.should_training_stop = True

    engine.calls.clear()
    engine.before_decoding = staticmethod(lambda number: number != 4 or goes_on.wait(60))
    stopped, _ = trainer_of(tmp_path / "stopped", [Stop()])
    stopped.train()
    assert stopped.state.global_step == 3
    goes_on.set()
    engine.calls.clear()
    resumed, _ = trainer_of(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    assert engine.calls[0].version == 2
    assert_same_models(straight, resumed)


def test_a_finished_run_goes_on_with_more_steps_and_new_prompts(tmp_path, engine):
    first, before = trainer_of(tmp_path, max_steps=3)
    first.train()
    more, after = trainer_of(tmp_path, max_steps=5)
    more.train(resume_from_checkpoint=True)
    assert len(after.groups) == 2
    assert not {*sum(before.positions, [])} & {*sum(after.positions, [])}


def test_an_engine_that_ends_stops_the_run_after_the_last_step(tmp_path, engine):
    def end(number: int) -> None:
        if number == 4:
            raise EOFError

    straight, _ = trainer_of(tmp_path / "straight", save_strategy="no")
    straight.train()
    engine.calls.clear()
    engine.before_decoding = staticmethod(end)
    trainer, _ = trainer_of(tmp_path / "ended", save_strategy="no")
    with pytest.raises(FailedRun, match="engine process stopped after optimizer step 3.*checkpoint-3"):
        trainer.train()
    resumed, _ = trainer_of(tmp_path / "ended", save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert_same_models(straight, resumed)
