"""All objectives on the exact update: gradients of REAL and MaxRL, any micro-batch, resumes, and skipped groups."""

import copy

import pytest
import torch
from support.models import RELATIVE, load_weights, logps_and_entropies, relative_error, tiny_model
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer
from support.trls_update import EIGHT, FOUR_MINIBATCHES, OWN, REUSED, difference, in_double_precision, run

from pacs_trl import GRPOTrainer, MaxRLTrainer, PACSTrainer, REALTrainer
from pacs_trl.objective import disco_loss, maxrl_advantages, real_loss
from pacs_trl.update.minibatch import FILLER


pytestmark = pytest.mark.trains

SPLITS = [
    {"per_device_train_batch_size": 16},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "steps_per_generation": 16},
    {"per_device_train_batch_size": 16, "max_tokens_per_micro_batch": 30, "packing": "never"},
]


def in_graph(model, rows):
    return [logps_and_entropies(model, row)[0] for row in rows]


def real(logps, old_logps, labels):
    proxies = torch.stack([(new - old).mean() for new, old in zip(logps, old_logps)])
    return real_loss(proxies, labels, num_generations=4, tau=0.3)


def disco(logps, old_logps, labels):
    return disco_loss(torch.stack([each.mean() for each in logps]), labels, num_generations=4, tau=0.3)


def maxrl(logps, old_logps, labels):
    """Without active clips: the sum of ratios with a constant divisor."""
    advantages = maxrl_advantages(labels, num_generations=4)
    ratios = torch.stack([(new - old).exp().sum() for new, old in zip(logps, old_logps)])
    return -(advantages * ratios).sum() / (16 * 16)


FAR = {"epsilon": 0.99, "epsilon_high": 9.0, "loss_type": "dr_grpo"}
GRADIENTS = {
    "real": (REALTrainer, {"tau": 0.3}, real),
    "disco": (REALTrainer, {"tau": 0.3, "group_loss": "disco"}, disco),
    "maxrl": (MaxRLTrainer, FAR, maxrl),
}


@pytest.mark.parametrize("split", [0, 1, 3])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_and_loss_equal_the_long_way(tmp_path, name, split):
    trainer_class, settings, loss = GRADIENTS[name]
    replay, recorder, model = Replay(unverifiable=0.2), Recorder(), tiny_model()
    long_way = copy.deepcopy(model).double()
    how = {**SPLITS[split], "num_iterations": 3, "max_steps": 6, **settings}
    trainer = build_trainer(
        tmp_path, model=model, replay=replay, trainer_class=trainer_class, more={"callbacks": [recorder]}, **how
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for update in range(6):
        generation, rows = rows_of_update(replay, trainer.args, update)
        with torch.no_grad():
            load_weights(long_way, replay.weights[generation])
            old_logps = in_graph(long_way, rows)
        load_weights(long_way, recorder.weights[update])
        long_way.zero_grad()
        labels = torch.tensor([float("nan") if r.label is None else r.label for r in rows], dtype=torch.float64)
        expected = loss(in_graph(long_way, rows), old_logps, labels)
        expected.backward()
        gradients = {n: p.grad for n, p in long_way.named_parameters() if n in recorder.weights[0]}
        assert relative_error(recorder.gradients[update], gradients) < RELATIVE
        if name != "maxrl":
            # DisCO's is a difference of sums of log-probs near 5.5, whose last digit in float32 is 5e-7
            rounding = 5e-6 if name == "disco" else None
            assert logged[update]["loss"] == pytest.approx(expected.item(), rel=RELATIVE, abs=rounding)


# grpo and bnpo have the two kinds of divisor: the tokens of a completion, and those of an optimizer step.
SLOW_LOSSES = [pytest.param(loss, marks=pytest.mark.slow) for loss in ("dapo", "cispo")]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", *SLOW_LOSSES])
def test_any_micro_batch_gives_the_same_weights(tmp_path, loss_type):
    settings = {**REUSED, "loss_type": loss_type, "top_entropy_quantile": 0.7}
    with in_double_precision():
        results = [
            run(tmp_path / str(i), OWN, "grpo", Replay(unverifiable=0.2), **(settings | split))
            for i, split in enumerate(SPLITS)
        ]
    before, reference, _ = results[0]
    for _, weights, _ in results[1:]:
        assert difference(weights, reference, before) < 1e-10


@pytest.mark.parametrize(
    ("trainer_class", "settings"),
    [(REALTrainer, {"group_loss": "disco"}), (PACSTrainer, {"proxy": "mean_logp"})],
    ids=["disco", "pacs"],
)
def test_a_completion_without_tokens_of_the_policy_has_no_mean_log_prob_to_compare(tmp_path, trainer_class, settings):
    """It counts as one without a label, not as the most probable one."""
    gradients = []
    for has_tokens in (False, True):

        def edit(generation, rows, has_tokens=has_tokens):
            for row in rows[::4]:
                row.env_mask = [int(has_tokens)] * len(row.completion_ids)
                row.label = None if has_tokens else row.label
            return rows

        replay, recorder = Replay(uniform_groups=0, tools=True, edit=edit), Recorder()
        more = {"callbacks": [recorder]}
        build_trainer(tmp_path, replay=replay, trainer_class=trainer_class, more=more, **EIGHT | settings).train()
        gradients.append(recorder.gradients[0])
    assert relative_error(*gradients) < RELATIVE


@pytest.mark.parametrize("settings", [EIGHT, FOUR_MINIBATCHES, REUSED], ids=["aligned", "minibatches", "reused"])
def test_groups_without_a_gradient_have_no_forward_pass(tmp_path, settings):
    """Three of four groups are uniform, and everything is counted that goes through the model."""
    passed = []

    class Counting(GRPOTrainer):
        def _set_up_update(self):
            super()._set_up_update()
            score = self.forward_pass.compute_logps

            def counted(model, prompt_ids, completion_ids):
                passed.append(sum(ids is not FILLER.prompt_ids for ids in prompt_ids))
                return score(model, prompt_ids, completion_ids)

            self.forward_pass.compute_logps = counted
            self.update.driver.entropy_of = lambda model, minibatch, indices: 0.0  # of a sample, for a metric

    trainers = {"grpo": (Counting, Counting._config_class)}
    settings = settings | {"startup_check": False, "learning_rate": 0.01}
    uniform = 3 * settings.get("steps_per_generation", 1)
    _, _, logs = run(tmp_path, trainers, "grpo", Replay(uniform_groups=uniform), **settings)
    minibatches, iterations = settings.get("steps_per_generation", 1), settings.get("num_iterations", 1)
    generated = 4 * 8 // iterations  # completions with a gradient, in all generations
    assert sum(log["update/forwarded_fraction"] for log in logs) * 16 == pytest.approx(generated * iterations)
    # and the log-probs of the policy that generated, which later updates need
    assert sum(passed) == generated * (iterations + (minibatches * iterations > 1))
