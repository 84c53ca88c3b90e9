"""GRPO on rollouts that can be drawn again learns what TRL's own trainer learns."""

import pytest
import torch
from replay import TOKENIZER, addition_dataset, digit_reward, tiny_model, trainable_weights
from seeds import shifted
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig
from trl import GRPOTrainer as TRLTrainer

from pacs_trl.baselines.grpo_trainer import GRPOTrainer


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 5,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": shifted(42),
    "beta": 0.1,  # the parent's own scoring of the reference, too
}


def train(trainer_class, output_dir, model_path, *, resume=None, **settings):
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        reward_funcs=digit_reward,
        args=GRPOConfig(str(output_dir), **(SETTINGS | settings)),
        train_dataset=addition_dataset(64),
        processing_class=TOKENIZER,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same_weights(first, second) -> bool:
    weights = trainable_weights(second.model)
    return all(torch.equal(weight, weights[name]) for name, weight in trainable_weights(first.model).items())


def logged(trainer) -> list[dict]:
    """What is learnt from and what comes out, without seconds."""
    own = ("time/", "train_", "step_time", "completions/empty_ratio")
    return [{k: v for k, v in entry.items() if not k.startswith(own)} for entry in trainer.state.log_history]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, model_path):
    """Two and a half generations of two updates."""
    return train(GRPOTrainer, tmp_path_factory.mktemp("straight"), model_path)


def test_the_first_epoch_is_that_of_trl_bit_for_bit(tmp_path, model_path, straight):
    trls = train(TRLTrainer, tmp_path, model_path)
    assert not same_weights(trls, train(TRLTrainer, tmp_path, model_path, max_steps=4))
    assert same_weights(trls, straight) and logged(trls) == logged(straight)


@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_is_bit_identical(tmp_path, model_path, straight, step):
    """Between generations, where TRL's own trainer is too, and within them, where it is not."""
    resumed = train(GRPOTrainer, tmp_path, model_path, resume=f"{straight.args.output_dir}/checkpoint-{step}")
    assert same_weights(straight, resumed) and logged(straight)[step:] == logged(resumed)[step:]


def test_its_parts_of_a_step_are_timed(straight):
    first, second = (entry for entry in straight.state.log_history[:2])
    assert (
        min(first[f"time/{part}"] for part in ("generation", "verification", "log_probs", "update", "optimizer")) > 0
    )
    assert second["time/generation"] == second["time/log_probs"] == 0 and second["time/update"] > 0


def test_left_padding_that_changes_log_probs_is_named(tmp_path, caplog):
    """TRL pads prompts on the left without positions: absolute positions then depend on the longest prompt of the
    batch."""
    settings = {"use_cpu": True, "bf16": False, "num_generations": 4, "max_completion_length": 8, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "report_to": "none", "save_strategy": "no"}
    sizes = {"vocab_size": len(TOKENIZER), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    torch.manual_seed(shifted(0))
    positions = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", initializer_range=0.5))
    for model, warned in ((positions, True), (tiny_model(), False)):
        args = GRPOConfig(str(tmp_path), **settings)
        data = {"train_dataset": addition_dataset(8), "processing_class": TOKENIZER}
        GRPOTrainer(model, digit_reward, args=args, **data).train()
        assert any("gpt2" in record.message for record in caplog.records) == warned
        caplog.clear()
