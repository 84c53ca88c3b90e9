"""The extension points: each example of `examples/extend_*.py`, named by a recipe."""

import ast
import math
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from support.examples import EXAMPLES
from support.problems import training_data
from support.scripted import run_recipe
from support.seeds import shifted

from examples.extend_data import sums
from examples.extend_environment import safe
from examples.extend_group_loss import pairwise_loss
from examples.extend_ratio_loss import SPOObjective
from examples.extend_reward import short_number_reward
from pacs_trl.baselines.grpo_trainer import RatioFunctionObjective
from pacs_trl.errors import UserError
from pacs_trl.plan.check import check_recipe
from pacs_trl.recipe import read_recipe
from pacs_trl.surrogate import RatioLoss
from pacs_trl.update.group_loss_update import AutogradObjective
from pacs_trl.update.groups import Groups
from pacs_trl.update.token_weights import TokenValues


def train(output_dir, model_path, *words, **settings):
    return run_recipe(output_dir, model_path, *words, max_completion_length=8, max_steps=1, **settings)


def run_documented_command(example: str, output_dir, model_path, *words: str):
    """Run `pacs-trl train` as in the docstring of an example, with a tiny model."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{example}.py").read_text()))
    command = next(line for line in docstring.splitlines() if line.startswith("pacs-trl train "))
    config, recipe, *options = shlex.split(command.removeprefix("pacs-trl train "))
    assert config == "--config" and Path(recipe).parent == Path("recipes/miniature")
    return train(output_dir, model_path, *options, *words, recipe=Path(recipe).name)


@pytest.mark.parametrize(
    "method",
    [
        "examples.extend_group_loss:PairwiseTrainer",
        "examples.extend_ratio_loss:SPOTrainer",
        "examples.extend_method:PrefixTrainer",
    ],
)
def test_the_documented_command_trains_with_the_method_of_a_user(tmp_path, model_path, method):
    example = method.removeprefix("examples.").partition(":")[0]
    trainer = run_documented_command(example, tmp_path, model_path, "--reward_funcs", "support.rollouts:digit_reward")
    assert f"{type(trainer).__module__}:{type(trainer).__name__}" == method
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert math.isfinite(log["loss"]) and log["grad_norm"] > 0
    assert f"method: {method}\n" in (tmp_path / "recipe.yaml").read_text()
    card = ModelCard.load(tmp_path / "README.md")
    assert trainer._name in card.text and "/papers/" not in card.text and "Citation" not in card.text
    assert card.data.tags == sorted(["trl", trainer._name.lower()])


def test_the_group_loss_and_its_coefficients_equal_those_worked_by_hand():
    """Two groups of two: ln(1 + e^-(2 - 1)) / 2, and a uniform one; and the derivative in the log-prob of a token."""
    proxies = torch.tensor([2.0, 1.0, 5.0, 7.0], dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0])
    loss = pairwise_loss(proxies, labels, num_generations=2, margin=0.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)) / 2)
    objective = AutogradObjective(pairwise_loss, "mean_log_ratio", {"margin": 0.0})
    groups = Groups(labels, [0, 0, 1, 1])
    coefficients = objective.coefficients(groups, proxies, torch.tensor([4, 2, 3, 3]))
    slope = 1 / (1 + math.e) / 2
    assert coefficients.tolist() == pytest.approx([-slope / 4, slope / 2, 0, 0])


def test_the_ratio_loss_has_the_derivative_of_its_formula():
    """With minus for positive advantages, `f' = 1 -+ (rho - 1) / epsilon`; the loss is differentiated in log rho."""
    generator = torch.Generator().manual_seed(shifted(0))
    old_logps, change = torch.randn(2, 2, 5, generator=generator, dtype=torch.float64)
    logps, coefficients = old_logps + 0.3 * change, torch.tensor([[-0.5], [0.25]]).double()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    values = dict.fromkeys(TokenValues._fields, torch.zeros(2, 5))
    values |= {"logps": logps, "old_logps": old_logps, "coefficients": coefficients, "mask": mask}
    tokens = TokenValues(**values)
    token_weights = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    with torch.no_grad():  # as in an evaluation
        terms = SPOObjective(RatioLoss("dapo"), epsilon=0.2).token_terms(tokens, [token_weights])
    ratio, sign = (logps - old_logps).exp(), torch.tensor([[1.0], [-1.0]]).double()
    values = (ratio - sign * (ratio - 1).square() / 0.4) * token_weights * mask
    torch.testing.assert_close(terms.surrogate_sums, values.sum(dim=1))
    derivatives = ratio * (1 - sign * (ratio - 1) / 0.2) * token_weights * mask
    torch.testing.assert_close(terms.logp_weights, derivatives)
    assert not terms.logp_weights.requires_grad and not terms.surrogate_sums.requires_grad


@pytest.mark.parametrize("loss_type", ["sapo", "cispo", "vespo"])
def test_a_ratio_loss_refuses_the_name_of_another_one(loss_type):
    with pytest.raises(UserError, match="loss_type"):
        SPOObjective(RatioLoss(loss_type))


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"delta": 3.0}, "delta"), ({"upper_bound": 1.28}, "epsilon_high"), ({"lower_bound": 0.7}, "epsilon_high")],
)
def test_a_ratio_loss_refuses_settings_that_its_function_does_not_read(settings, name):
    with pytest.raises(UserError, match=rf"^{name} would be ignored"):
        SPOObjective(RatioLoss(**settings))


def test_a_ratio_loss_takes_the_settings_that_its_function_reads():
    for epsilon in (0.1, 0.2, 0.3):
        loss = RatioLoss(lower_bound=1 - epsilon, upper_bound=1 + epsilon)
        assert SPOObjective(loss, epsilon=epsilon).epsilon == epsilon

    class TruncatedObjective(RatioFunctionObjective):
        settings_of_f = ("delta",)

        def f(self, ratio, sign):
            return ratio.clamp(max=self.ratio_loss.delta)

    assert TruncatedObjective(RatioLoss(delta=3.0)).f(torch.tensor([2.0, 4.0]), 1).tolist() == [2.0, 3.0]
    with pytest.raises(UserError, match="^epsilon would be ignored"):
        TruncatedObjective(RatioLoss(delta=3.0, lower_bound=0.7, upper_bound=1.3))


def test_the_reward_is_none_without_a_number():
    texts = ["The sum is 1,234", "It is 12 or so", "x", "7"]
    rewards = short_number_reward(texts, ["1234", "13", "5", "seven"])
    assert rewards == [pytest.approx(1 / 1.004), 0.0, 0.0, None]


def test_rows_rewards_and_environments_of_a_user_are_trained_with(tmp_path, model_path, tool_model_path, monkeypatch):
    words = ["--reward_funcs", "examples.extend_reward:short_number_reward", "--max_train_samples", "16"]
    trainer = train(tmp_path / "rows", model_path, *words, dataset_name="examples.extend_data:sums")
    assert {row["problem"] for row in trainer.train_dataset} <= {row["problem"] for row in sums()}
    assert "level" in trainer.train_dataset.column_names and trainer.reward_func_names == ["short_number_reward"]
    trainer = run_documented_command("extend_environment", tmp_path / "environment", tool_model_path)
    assert trainer.reward_func_names == ["opened"] and trainer.tools is not None
    lock = safe.environment_factory()
    lock.reset(seed=shifted(0))
    assert lock.turn(lock.number) == "open" and safe.reward_funcs[0]([0], [lock]) == [1.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "examples.extend_method:nothing"}, "method: .*nothing"),
        ({"method": "examples.extend_method:FirstTokens"}, "is no trainer of this package"),
        ({"method": "examples.extend_method:PrefixTrainer", "num_tokens": "0"}, "num_tokens must be at least 1"),
        ({"method": "examples.extend_method:PrefixTrainer", "num_token": "4"}, "num_token"),
        ({"method": "examples.extend_group_loss:PairwiseTrainer", "tau": "1"}, "tau"),
    ],
)
def test_wrong_names_of_a_user_are_refused(tmp_path, settings, words):
    argv = ["--model_name_or_path", "m", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    for key, value in (training_data() | settings).items():
        argv += [f"--{key}", value]
    with pytest.raises(ValueError, match=words):
        read_recipe(argv)


def test_rows_that_are_no_rows(tmp_path, model_path, monkeypatch):
    (tmp_path / "wrong_rows.py").write_text("def texts():\n    return ['1+1']\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must return rows"):
        train(tmp_path / "out", model_path, dataset_name="wrong_rows:texts")


def test_plan_reads_them(model_path):
    overrides = ["--method", "examples.extend_method:PrefixTrainer", "--dataset_name", "examples.extend_data:sums"]
    overrides += ["--model_name_or_path", model_path]
    recipe, errors = check_recipe("recipes/miniature/pacs.yaml", overrides, 1)
    assert errors == [] and recipe.training.num_tokens == 8
