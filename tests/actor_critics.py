"""Trainers with a critic, and a record of both models, for the tests of PPO and GenAC."""

import torch
from replay import SETTINGS as REPLAY
from replay import TOKENIZER, Recorder, addition_dataset, digit_reward, stored_label, trainable_weights


SETTINGS = REPLAY | {"gradient_accumulation_steps": 2, "critic_learning_rate": 0.05}

ADAM = {
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_steps": 4,
}


def build(
    trainer_class, output_dir, model_path, *, replay=None, callbacks=(), peft_config=None, reward=None, **settings
):
    return trainer_class(
        model_path,
        reward or (digit_reward if replay is None else stored_label),
        args=trainer_class._config_class(str(output_dir), **(SETTINGS | settings)),
        train_dataset=addition_dataset(),
        processing_class=TOKENIZER,
        rollout_func=replay,
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


class CriticRecorder(Recorder):
    """Keeps the critic's weights of every optimizer step as well, before and after the update."""

    def __init__(self):
        super().__init__()
        self.critics = []

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        self.critics.append(trainable_weights(self.trainer.critic))

    def on_train_end(self, args, state, control, **kwargs):
        self.critics.append(trainable_weights(self.trainer.critic))


def assert_close_gradients(actual: dict, expected: dict, relative: float = 1e-4):
    assert actual.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max() / largest
        assert error < relative, f"{name}: {error}"


def assert_same_models(found, expected):
    """Policy and critic of two trainers, bit by bit."""
    for mine, theirs in ((found.model, expected.model), (found.critic, expected.critic)):
        for name, weight in theirs.named_parameters():
            assert torch.equal(weight, mine.get_parameter(name)), name


def assert_same_logs(found, expected, first: int):
    """Numbers from one log entry on, without those of a clock."""
    for mine, theirs in zip(found.state.log_history[first:-1], expected.state.log_history[first:-1], strict=True):
        kept = [name for name in theirs if not name.startswith(("time/", "perf/", "step_time")) and name != "epoch"]
        assert str({name: mine[name] for name in kept}) == str({name: theirs[name] for name in kept})  # nan is nan
