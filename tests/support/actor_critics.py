"""Trainers with a critic, and a record of both models, for the tests of PPO and GenAC."""

from support.models import trainable_weights
from support.runs import SETTINGS as REPLAY
from support.runs import Recorder, build_trainer


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


def build(trainer_class, output_dir, model_path, *, callbacks=(), peft_config=None, **settings):
    more = {"callbacks": list(callbacks), "peft_config": peft_config}
    return build_trainer(output_dir, model=model_path, trainer_class=trainer_class, more=more, **(SETTINGS | settings))


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


def assert_same_logs(trainer, expected, first: int):
    """Numbers from one log entry on, without those of a clock."""
    for mine, theirs in zip(trainer.state.log_history[first:-1], expected.state.log_history[first:-1], strict=True):
        kept = [name for name in theirs if not name.startswith(("time/", "perf/", "step_time")) and name != "epoch"]
        assert str({name: mine[name] for name in kept}) == str({name: theirs[name] for name in kept})  # nan is nan
