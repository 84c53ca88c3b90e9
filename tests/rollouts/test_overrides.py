"""Overrides of TRL's methods, and attributes that callbacks change: honored, or refused by name; never ignored."""

import math
import re
from pathlib import Path

import pytest
import torch
from support.models import assert_same_models
from support.rollouts import MAX_COMPLETION_LENGTH, Replay, addition_dataset, digit_reward
from support.runs import build_trainer
from transformers import TrainerCallback

from pacs_trl import GRPOTrainer, MaxRLTrainer, PACSTrainer, REALTrainer, RLOOTrainer
from pacs_trl.errors import FailedRun
from pacs_trl.rollouts.overrides import NOT_CALLED


EXACT = [PACSTrainer, GRPOTrainer, RLOOTrainer, MaxRLTrainer, REALTrainer]
DOCS = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def methods_in_docs(heading: str) -> list[str]:
    """The names in the first column of the table under a heading of docs/extending.md."""
    section = DOCS.split(heading)[1].split("\n\n### ")[0].split("\n## ")[0]
    columns = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return re.findall(r"`(\w+)`", " ".join(columns))


# Overrides ------------------------------------------------------------------------------------------------------


def opposite(completions, **kwargs):
    return [1 - reward for reward in digit_reward(completions)]


@pytest.mark.parametrize("trainer_class", EXACT)
def test_rewards_are_those_that_an_override_returns(tmp_path, trainer_class):
    """The same weights as with a reward function that returns them."""

    class Corrected(trainer_class):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return 1 - super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    trainers = []
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "seed": 3}
    for each, reward in ((Corrected, digit_reward), (trainer_class, opposite)):
        more = {"eval_dataset": addition_dataset(8)}
        trainers.append(build_trainer(tmp_path, reward=reward, trainer_class=each, more=more, **settings))
        trainers[-1].train()
    assert_same_models(*trainers)
    first, second = ([log["eval_reward"] for log in t.state.log_history if "eval_reward" in log] for t in trainers)
    assert first == second and len(first) == 2


def test_rewards_may_be_calculated_without_reward_functions(tmp_path):
    class Own(PACSTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self._log_completion_extra("length", [len(ids) for ids in completion_ids_list])
            return torch.tensor([[float(len(ids) % 2)] for ids in completion_ids_list])

    trainer = build_trainer(tmp_path, trainer_class=Own, max_steps=1)
    trainer.train()
    assert trainer._labels.tolist() == [length % 2 for length in trainer._logs["extra"]["length"]]


def test_advantages_of_an_override_are_trained(tmp_path):
    """Advantages of 0 leave the weights as they are; a method without advantages says so."""

    def with_zeros(trainer_class):
        class Zeros(trainer_class):
            def _generate_and_score_completions(self, inputs):
                batch = super()._generate_and_score_completions(inputs)
                return batch | {"advantages": 0 * batch["advantages"]}

        return Zeros

    for trainer_class in (GRPOTrainer, RLOOTrainer, MaxRLTrainer):
        trainer = build_trainer(tmp_path, trainer_class=with_zeros(trainer_class), beta=0.0)
        before = trainer.model.get_input_embeddings().weight.clone()
        trainer.train()
        assert torch.equal(trainer.model.get_input_embeddings().weight, before)
    for trainer_class in (PACSTrainer, REALTrainer):
        with pytest.raises(ValueError, match="Zeros._generate_and_score_completions changed the advantages"):
            build_trainer(tmp_path, trainer_class=with_zeros(trainer_class)).train()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: {"prompt_ids": batch["prompt_ids"]}, "without the key 'labels'"),
        (lambda batch: batch | {"old_per_token_logps": None}, "returned 'old_per_token_logps'"),
        (lambda batch: batch | {"advantages": batch["advantages"][:, None].repeat(1, 3)}, r"of shape \(8, 3\)"),
    ],
)
def test_batches_of_an_override_that_would_be_read_in_part(tmp_path, change, words):
    class Changed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return change(super()._generate_and_score_completions(inputs))

    with pytest.raises(ValueError, match=words):
        build_trainer(tmp_path, trainer_class=Changed).train()


@pytest.mark.parametrize("name", NOT_CALLED)
def test_overrides_that_would_be_ignored_are_refused_by_name(tmp_path, name):
    overriding = type("Overriding", (GRPOTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=f"Overriding overrides {name}, which the exact update does not call"):
        build_trainer(tmp_path, model="no model", trainer_class=overriding)
    trainer = build_trainer(tmp_path, trainer_class=GRPOTrainer)
    setattr(trainer, name, lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=f"GRPOTrainer overrides {name}, which"):
        trainer.train()


def test_refused_overrides_are_those_of_the_documentation():
    assert methods_in_docs("### Refused") == list(NOT_CALLED)


def test_overrides_of_the_documentation_are_called(tmp_path):
    """Each of them in a run with evaluations and a checkpoint, and the one that resumes from it."""
    called = set()

    def note(name):
        def override(self, *args, **kwargs):
            called.add(name)
            return getattr(super(Noting, self), name)(*args, **kwargs)

        return override

    names = methods_in_docs("### Called")
    Noting = type("Noting", (GRPOTrainer,), {name: note(name) for name in names})  # noqa: N806

    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(completion) for completion in completions])
        log_metric("length", 1.0)
        return digit_reward(completions)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    more = {"eval_dataset": addition_dataset(8)}
    trainer = build_trainer(tmp_path, trainer_class=Noting, reward=reward, more=more, max_grad_norm=1.0, **settings)
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=True)
    assert called == {name for name in names if name not in WITH_TOOLS}


WITH_TOOLS = ("_tool_call_loop", "_get_tool_suffix_ids")  # called only with tools, see test_tools.py


# Methods that users call ----------------------------------------------------------------------------------------


def test_log_probs_are_returned_to_whoever_asks(tmp_path):
    """Also to a reward function, and to an override of `_generate` after its generation."""
    seen = []

    class Asking(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            ids = torch.tensor([[5, *completion_ids_list[0]]])
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, torch.ones_like(ids), ids.shape[1] - 1, compute_entropy=True
            )
            seen.append((ids, logps, entropies))
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    trainer = build_trainer(tmp_path, trainer_class=Asking, steps_per_generation=2, max_steps=1, learning_rate=0.0)
    trainer.train()
    ((ids, logps, entropies),) = seen
    expected = trainer.model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
    torch.testing.assert_close(logps, expected.gather(2, ids[:, 1:, None])[..., 0])
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(dim=-1))


def test_prepare_inputs_returns_what_that_of_trl_returns(tmp_path):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
    trainer = build_trainer(tmp_path, trainer_class=GRPOTrainer, **settings)
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert inputs["completion_ids"].shape[0] == 8 and inputs["completion_ids"].shape[1] <= MAX_COMPLETION_LENGTH
    assert {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"} <= inputs.keys()


# Attributes and settings that callbacks change ------------------------------------------------------------------


class Change(TrainerCallback):
    """Set an attribute of the trainer, or with `args.` of its settings, at the second optimizer step."""

    def __init__(self, name, value):
        self.name, self.value, self.trainer = name, value, None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            owner = args if self.name.startswith("args.") else self.trainer
            setattr(owner, self.name.removeprefix("args."), self.value)


def changing(path, name, value, trainer_class=GRPOTrainer, **settings):
    change = Change(name, value)
    settings = {"num_iterations": 2, "steps_per_generation": 1, "learning_rate": 0.5} | settings
    more = {"callbacks": [change]}
    trainer = build_trainer(path, replay=Replay(), trainer_class=trainer_class, more=more, **settings)
    change.trainer = trainer
    return trainer


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon_low", 1e-6), ("epsilon_high", 1e-6), ("beta", 5.0), ("beta", 0.0)]
)
def test_attributes_that_the_objective_reads_take_effect(tmp_path, name, value):
    """From the second step on: as a run that was constructed with the value, whose first step is the same: its ratios
    are 1, and its policy is the reference."""
    setting = {"epsilon_low": "epsilon", "epsilon_high": "epsilon_high", "beta": "beta"}[name]
    settings = {"beta": 0.5, "epsilon": 0.2, "epsilon_high": 0.2}
    changed = changing(tmp_path, name, value, **settings)
    expected = changing(tmp_path, "unused", 0, **settings | {setting: value})
    unchanged = changing(tmp_path, "unused", 0, **settings)
    for trainer in (changed, expected, unchanged):
        trainer.train()
    assert_same_models(changed, expected)
    with pytest.raises(AssertionError, match="model"):
        assert_same_models(changed, unchanged)


@pytest.mark.parametrize("name", ["epsilon_low", "beta"])
def test_attributes_that_a_callback_has_changed_are_kept_after_a_resume(tmp_path, name):
    settings = {"beta": 0.5, "epsilon": 0.2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    straight = changing(tmp_path / "straight", name, 1e-6 if name != "beta" else 5.0, **settings)
    straight.train()
    resumed = changing(tmp_path / "resumed", "unused", 0, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert_same_models(straight, resumed)


@pytest.mark.parametrize(
    ("trainer_class", "name", "value"),
    [
        (GRPOTrainer, "beta", 0.1),  # without a reference
        (GRPOTrainer, "loss_type", "dr_grpo"),
        (GRPOTrainer, "temperature", 0.5),
        (PACSTrainer, "epsilon_low", 0.1),
        (RLOOTrainer, "num_generations", 8),
        (GRPOTrainer, "aux_loss_enabled", True),
        (GRPOTrainer, "router_aux_loss_coef", 0.5),  # of a model without experts
    ],
)
def test_attributes_that_nothing_reads_anew_are_refused(tmp_path, trainer_class, name, value):
    trainer = changing(tmp_path, name, value, trainer_class, beta=0.0)
    with pytest.raises(FailedRun, match=rf"trainer.{name} was changed from .* to {value!r}"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("trainer_class", [PACSTrainer, RLOOTrainer, REALTrainer])
def test_a_beta_that_is_annealed_to_0_and_raised_again_takes_effect(tmp_path, trainer_class):
    """The KL to the reference is logged in the steps with a coefficient."""

    class Anneal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.beta = (0.5, 0.0, 0.5)[state.global_step]

    more = {"callbacks": [Anneal()]}
    trainer = build_trainer(tmp_path, replay=Replay(), trainer_class=trainer_class, more=more, beta=0.5, max_steps=3)
    trainer.train()
    assert ["kl" in log for log in trainer.state.log_history if "loss" in log] == [True, False, True]


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_beta_that_is_no_coefficient_is_refused(tmp_path, value):
    trainer = changing(tmp_path, "beta", value, beta=0.5)
    with pytest.raises(ValueError, match="trainer.beta was set to .* finite number of at least 0"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("name", ["epsilon", "learning_rate", "num_iterations"])
def test_settings_that_are_changed_in_a_run_are_refused(tmp_path, name):
    trainer = changing(tmp_path, f"args.{name}", 3)
    with pytest.raises(ValueError, match=rf"^args.{name} was changed from .* to 3"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_settings_of_the_optimizer_may_change_until_it_is_created(tmp_path):
    """A learning rate of 0 leaves the weights as they are."""
    trainer = build_trainer(tmp_path, replay=Replay())
    before = trainer.model.get_input_embeddings().weight.clone()
    trainer.args.learning_rate = 0.0
    trainer.train()
    assert torch.equal(trainer.model.get_input_embeddings().weight, before)
    trainer.args.learning_rate = 0.5
    with pytest.raises(ValueError, match="args.learning_rate was changed from 0.0 to 0.5 after construction"):
        trainer.train()
