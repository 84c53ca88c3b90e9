"""PPOTrainer around the loss: LoRA, saving, resuming, the critic's start, and a recipe."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from support import actor_critics
from support.actor_critics import assert_same_logs
from support.models import assert_same_models, tiny_model, trainable_weights
from support.problems import CRITIC_PROMPT
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.scripted import run_recipe
from support.seeds import shifted
from test_ppo_trainer import build, recorded
from transformers import AutoModelForCausalLM

from pacs_trl import PPOConfig, PPOTrainer
from pacs_trl.rollouts.checkpoint_files import last_checkpoint


def test_a_lora_policy_and_all_weights_of_the_critic_are_trained(tmp_path, model_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer, recorder = recorded(
        tmp_path, model_path, peft_config=lora, learning_rate=1.0, gradient_checkpointing=True
    )
    trainer.train()
    first, last = recorder.weights[0], trainable_weights(trainer.model)
    assert all("lora" in name for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert len(recorder.critics[0]) == len(list(trainer.critic.parameters()))
    assert not torch.equal(recorder.critics[0]["model.norm.weight"], recorder.critics[-1]["model.norm.weight"])


@pytest.mark.parametrize(("schedule", "factor"), [("reduce_lr_on_plateau", 1 / 4), ("greedy", 2 / 4)])
def test_a_schedule_that_follows_evaluations_is_also_that_of_the_critic(tmp_path, model_path, schedule, factor):
    """The first reward is the best one, which lets `greedy` double the rates; two others halve them."""
    settings = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "min_lr": 0.0}}
    settings |= {"learning_rate": 0.02, "critic_learning_rate": 0.04, "max_completion_length": 4}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "max_steps": 3}
    trainer = build_trainer(
        tmp_path,
        model=model_path,
        reward=lambda completions, **kwargs: [0.5] * len(completions),
        trainer_class=PPOTrainer,
        more={"eval_dataset": addition_dataset(2)},
        **settings,
    )
    trainer.train()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (trainer.optimizer, trainer._critic_optimizer)]
    assert rates == pytest.approx([0.02 * factor, 0.04 * factor])


ADAM = actor_critics.ADAM | {"lr_scheduler_type": "linear", "num_iterations": 1}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, model_path):
    """Four updates over two generations, with a checkpoint after each."""
    output_dir = tmp_path_factory.mktemp("run")
    trainer = build(output_dir, model_path, save_strategy="steps", save_steps=1, **ADAM)
    trainer.train()
    return trainer


def test_the_model_is_that_of_the_policy(tmp_path, finished_run):
    checkpoint = Path(finished_run.args.output_dir) / "checkpoint-4"
    card = (checkpoint / "README.md").read_text()
    assert "fine-tuned with PPO" in card and "- arxiv:1707.06347" in card
    assert not (checkpoint / "critic" / "README.md").exists()
    finished_run.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "critic").exists()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    for name, weight in finished_run.model.named_parameters():
        assert torch.equal(weight, saved.get_parameter(name))


@pytest.mark.parametrize("update", [1, 2])
def test_a_resumed_run_is_bit_identical(tmp_path, model_path, finished_run, update):
    resumed = build(tmp_path, model_path, **ADAM)
    resumed.train(resume_from_checkpoint=f"{finished_run.args.output_dir}/checkpoint-{update}")
    assert_same_models(resumed, finished_run)
    assert_same_logs(resumed, finished_run, update)


def test_a_second_run_draws_rows_of_its_own(tmp_path, model_path):
    """Stopped in the middle of a generation of two updates; the used trainer then equals a fresh one with its
    weights."""
    settings = {"steps_per_generation": 4, "max_steps": 3}
    used = build(tmp_path, model_path, **settings)
    used.train()
    fresh = build(tmp_path, model_path, **settings)
    fresh.model.load_state_dict(used.model.state_dict())
    fresh.critic.load_state_dict(used.critic.state_dict())
    for trainer in (used, fresh):
        torch.manual_seed(shifted(3))
        trainer.train()
    assert_same_models(used, fresh)


class TestResumeRefuses:
    @pytest.mark.parametrize(("name", "now"), [("gae_lambda", 0.9), ("critic_learning_rate", 0.1)])
    def test_other_settings_than_the_checkpoint_has_are_refused(self, tmp_path, model_path, finished_run, name, now):
        trainer = build(tmp_path, model_path, **(ADAM | {name: now}))
        with pytest.raises(ValueError, match=name):
            trainer.train(resume_from_checkpoint=f"{finished_run.args.output_dir}/checkpoint-2")

    def test_a_checkpoint_with_a_truncated_critic_is_skipped_and_refused(self, tmp_path, model_path, finished_run):
        for step in (2, 3):
            shutil.copytree(f"{finished_run.args.output_dir}/checkpoint-{step}", tmp_path / f"checkpoint-{step}")
        truncated = tmp_path / "checkpoint-3" / "critic" / "optimizer.pt"
        truncated.write_bytes(truncated.read_bytes()[:100])
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
        with pytest.raises(ValueError, match="critic/optimizer.pt"):
            build(tmp_path, model_path, **ADAM).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


class TestCritic:
    def test_a_checkpoint_is_a_critic_to_start_from(self, tmp_path, model_path, finished_run):
        path = f"{finished_run.args.output_dir}/checkpoint-4/critic"
        trainer = build(tmp_path, model_path, critic_model_name_or_path=path)
        for name, weight in finished_run.critic.named_parameters():
            assert torch.equal(weight, trainer.critic.get_parameter(name))

    def test_starts_as_the_policy_under_a_head_that_depends_on_the_seed_only(self, tmp_path, model_path):
        first = build(tmp_path, model_path)
        torch.rand(1)  # another state of the random number generator
        second = build(tmp_path, model_path)
        assert torch.equal(first.critic.score.weight, second.critic.score.weight)
        torch.testing.assert_close(
            first.critic.model.layers[0].mlp.up_proj.weight, first.model.model.layers[0].mlp.up_proj.weight
        )
        assert first.critic.dtype == torch.float32

    def test_a_policy_that_was_changed_in_memory_needs_one(self, tmp_path, model_path):
        """Its critic would start from the weights before the change."""
        policy = AutoModelForCausalLM.from_pretrained(model_path)
        build(tmp_path, policy)
        with torch.no_grad():
            policy.model.norm.weight.add_(1e-3)
        adapted = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))
        for changed in (policy.requires_grad_(), adapted):
            with pytest.raises(ValueError, match="norm.weight.*critic_model_name_or_path"):
                build(tmp_path, changed)
        rounded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).float()
        build(tmp_path, rounded)
        build(tmp_path, policy, critic_model_name_or_path=model_path)

    def test_a_policy_without_path_needs_one(self, tmp_path):
        with pytest.raises(ValueError, match="critic_model_name_or_path"):
            PPOTrainer(tiny_model(), digit_reward, args=PPOConfig(str(tmp_path), **actor_critics.SETTINGS))


METHODS = {  # recipe, settings, metrics of one method only
    "ppo": ("sums-0.1m/ppo.yaml", {}, {"value_loss", "value_clip_fraction", "value_mean", "return_mean"}),
    "genac": (
        "genac.yaml",
        {"critic_max_new_tokens": 6, "critic_pretraining_steps": 0},
        {"critic_loss", "critic_reward", "brier", "unparsed", "segments", "answer_length"},
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_recipe_trains_both_models_on_the_miniature_world(tmp_path, model_path, monkeypatch, method):
    """Through the same entry point as the large runs: data, verifier, checkpoints, card."""
    monkeypatch.chdir(tmp_path)
    recipe, settings, metrics = METHODS[method]
    settings |= {"steps_per_generation": 2, "max_completion_length": 16, "warmup_steps": 0, "learning_rate": 1e-3}
    rewards = "--reward_funcs math_reward support.rollouts.digit_reward --reward_weights 0.5 0.5".split()
    trainer = run_recipe(tmp_path / "run", model_path, *rewards, recipe=recipe, **settings)
    for name, weight in tiny_model().named_parameters():
        assert not torch.equal(weight, trainer.model.get_parameter(name)), name
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert kept.get("critic_prompt") == (CRITIC_PROMPT if method == "genac" else None)
    assert f"fine-tuned with {trainer._name}" in (tmp_path / "run" / "README.md").read_text()
    logged = {name for entry in trainer.state.log_history for name in entry}
    shared = {"critic_grad_norm", "approx_kl", "explained_variance"}
    assert {f"{method}/{name}" for name in metrics | shared} <= logged and "entropy" in logged
