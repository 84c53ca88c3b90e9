"""The entropy bonus on the exact update: TRL's weights, any micro-batch, its gradient, adaptive control, callbacks."""

import copy
import math
from unittest.mock import patch

import pytest
import torch
import trl
from peft import LoraConfig
from support.models import RELATIVE, assert_same_models, logps_and_entropies, relative_error, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, assert_resumes, build_trainer
from support.trls_update import EIGHT, OWN, REUSED, TRLS, difference, in_double_precision, run
from test_objectives import SPLITS
from transformers import TrainerCallback

from pacs_trl import GRPOTrainer, MaxRLTrainer, PACSTrainer, PPOTrainer, REALTrainer, RLOOTrainer
from pacs_trl.update.forward_pass import ForwardPass, fused_head


pytestmark = pytest.mark.trains

# With this factor on the weights of the head the tiny model starts with 2.7 nats, which the bonus raises above 3.
SHARPNESS = 3.0
BONUS = {"entropy_coef": 0.3}
ADAPTIVE = {
    "use_adaptive_entropy": True,
    "entropy_target": 3.0,
    "entropy_coef": 0.3,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.6,
    "entropy_coef_delta": 0.2,
}
CASES = {
    "on policy": (EIGHT | BONUS, {}),
    "all groups uniform": (EIGHT | BONUS, {"uniform_groups": 4}),
    "reused, grpo, tools": (REUSED | BONUS | {"loss_type": "grpo"}, {"tools": True}),
    "truncated and masked": (
        REUSED | BONUS | {"mask_truncated_completions": True},
        {"truncated": 0.4, "unverifiable": 0.3},
    ),
    "highest entropies": (EIGHT | BONUS | {"top_entropy_quantile": 0.4}, {}),
    "adaptive": (EIGHT | ADAPTIVE, {}),
    "adaptive, highest entropies": (EIGHT | ADAPTIVE | {"top_entropy_quantile": 0.4}, {}),
}


def high_entropy_mask(self, entropies, mask, threshold):
    """TRL's in float64: its quantile is rounded to float32, and may split first tokens of a group, whose entropies are
    equal up to rounding."""
    return (entropies >= torch.quantile(entropies[mask.bool()], threshold) - 1e-9) & mask.bool()


@pytest.mark.parametrize(("settings", "replay"), CASES.values(), ids=CASES)
def test_weights_and_logs_are_those_of_trl_in_one_micro_batch(tmp_path, settings, replay):
    with in_double_precision(), patch.object(trl.GRPOTrainer, "get_high_entropy_mask", high_entropy_mask):
        how = {"sharpness": SHARPNESS, **settings}
        before, trls, expected = run(tmp_path / "trl", TRLS, "grpo", Replay(**replay), **how)
        _, ours, logs = run(tmp_path / "ours", OWN, "grpo", Replay(**replay), **how)
    assert difference(ours, trls, before) < 1e-10
    for ours_logged, other in zip(logs, expected, strict=True):
        for name in ("loss", "policy_loss", "entropy", "entropy_coef", "grad_norm"):
            assert ours_logged[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_adaptive_control_raises_the_coefficient_up_to_the_target_and_lowers_it_above(tmp_path):
    """The bonus of a step has the coefficient after the step before, or 0 if the entropy of that was above 3."""
    entropies = [2.0, 3.0, 2.0, 4.0, 4.0, 4.0, 2.0]
    trainer = build_trainer(tmp_path, replay=Replay(), trainer_class=GRPOTrainer, **(ADAPTIVE | {"max_steps": 7}))
    run_update, applied = trainer.update.run, []

    def run_with_given_entropy(model, minibatch, timing):
        applied.append(trainer.update.entropy_coef)
        return run_update(model, minibatch, timing)._replace(mean_bonus_entropy=entropies[len(applied) - 1])

    trainer.update.run = run_with_given_entropy
    trainer.train()
    assert applied == pytest.approx([0.0, 0.5, 0.6, 0.6, 0.0, 0.0, 0.0])
    logged = [log["entropy_coef"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx([0.5, 0.6, 0.6, 0.4, 0.2, 0.1, 0.3])


@pytest.mark.parametrize("loss_type", ["bnpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_any_micro_batch_gives_the_same_weights(tmp_path, loss_type):
    settings = {**REUSED, **ADAPTIVE, "loss_type": loss_type, "top_entropy_quantile": 0.7}
    with in_double_precision():
        results = [
            run(tmp_path / str(i), OWN, "grpo", Replay(unverifiable=0.2), sharpness=SHARPNESS, **(settings | split))
            for i, split in enumerate([SPLITS[0], *SPLITS[2:]])
        ]
    before, reference, logs = results[0]
    for _, weights, other_logs in results[1:]:
        assert difference(weights, reference, before) < 1e-10
        assert [log["entropy_coef"] for log in other_logs] == [log["entropy_coef"] for log in logs]


GRADIENTS = {
    "pacs": (PACSTrainer, {}),
    "pacs, whole groups": (PACSTrainer, {"group_layout": "whole", "num_iterations": 2}),
    "pacs, split groups": (PACSTrainer, {"group_layout": "split", "num_iterations": 2, "beta": 0.1}),
    "real": (REALTrainer, {"num_iterations": 2}),
    "maxrl": (MaxRLTrainer, {"num_iterations": 2}),
    "rloo": (RLOOTrainer, {"beta": 0.0, "num_iterations": 2}),
}


@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_without_a_bonus_minus_the_coefficient_times_that_of_the_mean_entropy(
    tmp_path, model_path, name, split
):
    """In float64, completion by completion; two of four groups are uniform, and labels are missing."""
    trainer_class, settings = GRADIENTS[name]
    settings = {**SPLITS[split], **settings, "max_steps": settings.get("num_iterations", 1), "learning_rate": 0.01}
    gradients, losses = [], []
    for coefficient in (0.0, 10.0):  # so that the rounding of the other terms is small
        replay, recorder = Replay(unverifiable=0.3, uniform_groups=2, tools=True), Recorder()
        trainer = build_trainer(
            tmp_path / str(coefficient),
            model=model_path,
            replay=replay,
            trainer_class=trainer_class,
            more={"callbacks": [recorder]},
            **settings,
            entropy_coef=coefficient,
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        gradients.append(recorder.gradients[0])
        losses.append(logs[0]["loss"])

    model = copy.deepcopy(tiny_model()).double()
    model.load_state_dict({n: w.double() for n, w in recorder.weights[0].items()}, strict=False)
    _, rows = rows_of_update(replay, trainer.args, 0)
    masks = [torch.tensor(row.env_mask) for row in rows]
    entropies = [logps_and_entropies(model, row)[1] for row in rows]
    number_with_tokens = sum(int(mask.any()) for mask in masks)
    assert all(log["update/forwarded_fraction"] >= number_with_tokens / len(rows) for log in logs)
    total = sum((entropy * mask).sum() for entropy, mask in zip(entropies, masks, strict=True))
    mean = total / sum(mask.sum() for mask in masks)
    mean.backward()
    expected = {
        parameter: -10 * p.grad for parameter, p in model.named_parameters() if parameter in recorder.weights[0]
    }
    without, with_bonus = gradients
    zeros = {parameter: torch.zeros_like(gradient) for parameter, gradient in expected.items()}
    gradients = {
        parameter: with_bonus[parameter] - (zeros[parameter] if without[parameter] is None else without[parameter])
        for parameter in expected
    }
    assert relative_error(gradients, expected) < RELATIVE
    assert losses[1] == pytest.approx(losses[0] - 10 * mean.item(), rel=1e-4)


def test_fused_and_own_head_have_the_same_gradient_of_entropies():
    rows = [[3, 5, 7], [3, 5, 7], [4]], [[1, 2, 3], [6], [8, 9]]
    gradients = []
    for fused in (True, False):
        model = tiny_model()
        forward_pass = ForwardPass(model, torch.device("cpu"), temperature=0.7)
        forward_pass.fused, forward_pass.entropies_have_gradient = fused, True
        with fused_head(model, 0.7):
            torch.cat(forward_pass.compute_logps(model, *rows).entropies).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert relative_error(gradients[0], gradients[1]) < RELATIVE


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PACSTrainer])
@pytest.mark.slow
def test_adaptive_control_resumes(tmp_path, trainer_class):
    def build(directory):
        model = tiny_model()
        model.lm_head.weight.data *= SHARPNESS
        settings = {**ADAPTIVE, "steps_per_generation": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
        return build_trainer(directory, model=model, replay=Replay(), trainer_class=trainer_class, **settings)

    straight, again = assert_resumes(build, tmp_path, 1, 4)
    assert straight.entropy_coef == again.entropy_coef != 0.3
    assert straight._last_world_entropy == again._last_world_entropy < math.inf


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PPOTrainer])
def test_a_second_training_starts_with_the_coefficient_of_the_configuration(tmp_path, model_path, trainer_class):
    settings = {**ADAPTIVE, "entropy_target": 9.0, "learning_rate": 0.0, "model": model_path}
    trainer = build_trainer(tmp_path, replay=Replay(), trainer_class=trainer_class, **settings)
    for _ in range(2):
        trainer.train()
    coefficients = [log["entropy_coef"] for log in trainer.state.log_history if "entropy_coef" in log]
    assert coefficients == pytest.approx([0.5, 0.6])


def test_the_bonus_of_an_actor_critic_method_has_a_gradient_with_the_head_of_the_model(tmp_path, model_path):
    """The fused head does not compute the tokens that an adapter trains."""
    gradients = []
    for coefficient in (0.0, 5.0):
        recorder = Recorder()
        lora = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6], task_type="CAUSAL_LM")
        more = {"peft_config": lora, "callbacks": [recorder]}
        settings = {"model": model_path, "entropy_coef": coefficient, "max_steps": 1}
        trainer = build_trainer(tmp_path, replay=Replay(), trainer_class=PPOTrainer, more=more, **settings)
        trainer.train()
        assert not trainer.forward_pass.fused
        gradients.append(recorder.gradients[0])
    assert relative_error(*gradients) > 0.1


class AtStepBegin(TrainerCallback):
    """Calls `change(trainer)` at the start of the second optimizer step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.change(self.trainer)


def changed(tmp_path, change, trainer_class=GRPOTrainer, **settings):
    callback = AtStepBegin(change)
    trainer = callback.trainer = build_trainer(
        tmp_path, replay=Replay(), trainer_class=trainer_class, more={"callbacks": [callback]}, **settings
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PACSTrainer])
def test_a_coefficient_set_by_a_callback_takes_effect(tmp_path, trainer_class):
    """In the second of two steps; the first has the same coefficient in both runs."""

    changed_up = changed(tmp_path / "up", set_larger, trainer_class, entropy_coef=0.1)
    unchanged = changed(tmp_path / "same", set_positive, trainer_class, entropy_coef=0.1)
    last, other = (
        [log for log in trainer.state.log_history if "loss" in log][1] for trainer in (changed_up, unchanged)
    )
    assert last["entropy_coef"] == 2.0 and last["policy_loss"] == pytest.approx(other["policy_loss"], rel=1e-6)
    assert last["loss"] == pytest.approx(last["policy_loss"] - 2.0 * last["entropy"], rel=1e-5)
    with pytest.raises(AssertionError):
        assert_same_models(changed_up, unchanged)


@pytest.mark.slow
def test_a_coefficient_set_by_a_callback_is_kept_after_a_resume(tmp_path):
    def build(directory):
        callback = AtStepBegin(set_larger)
        settings = {"entropy_coef": 0.1, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
        callback.trainer = build_trainer(
            directory, replay=Replay(), trainer_class=GRPOTrainer, more={"callbacks": [callback]}, **settings
        )
        return callback.trainer

    _, again = assert_resumes(build, tmp_path, 1, 2)
    assert again.entropy_coef == 2.0


def set_larger(trainer):
    trainer.entropy_coef = 2.0


def set_args(trainer):
    trainer.args.entropy_coef = 0.2


def set_negative(trainer):
    trainer.entropy_coef = -0.1


def set_positive(trainer):
    trainer.entropy_coef = 0.1


def set_adaptive(trainer):
    trainer.use_adaptive_entropy = True


@pytest.mark.parametrize(
    ("change", "coefficient", "words"),
    [
        (set_args, 0.1, "args.entropy_coef was changed from 0.1 to 0.2"),
        (set_negative, 0.1, "entropy_coef was set to -0.1"),
        (set_positive, 0.0, "constructed with entropy_coef=0.0"),
        (set_adaptive, 0.0, "constructed with entropy_coef=0.0"),
    ],
)
def test_a_coefficient_that_would_be_ignored_is_an_error_before_the_next_generation(
    tmp_path, change, coefficient, words
):
    generations = []

    class Counting(GRPOTrainer):
        def _generate_minibatches(self, inputs):
            generations.append(self.state.global_step)
            super()._generate_minibatches(inputs)

    with pytest.raises(ValueError, match=words):
        changed(tmp_path, change, Counting, entropy_coef=coefficient)
    assert generations == [0]


def test_loss_of_an_evaluation_has_the_bonus_as_in_trl(tmp_path):
    settings = {**EIGHT, **BONUS, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    settings |= {"per_device_eval_batch_size": 16}
    with in_double_precision():
        how = {"sharpness": SHARPNESS, **settings}
        *_, expected = run(tmp_path / "trl", TRLS, "grpo", Replay(), **how)
        *_, logs = run(tmp_path / "ours", OWN, "grpo", Replay(), **how)
    pairs = [pair for pair in zip(logs, expected, strict=True) if "eval_loss" in pair[1]]
    assert len(pairs) == 3
    for ours_logged, other in pairs:
        assert "eval_entropy_coef" not in ours_logged
        for name in ("eval_loss", "eval_policy_loss", "eval_entropy"):
            assert ours_logged[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
