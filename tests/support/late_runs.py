"""Trainers with a lag that keep what they generate, and what their batches are compared with."""

import torch

from pacs_trl import PACSTrainer
from support.models import LORA
from support.rollouts import addition_dataset
from support.runs import build_trainer
from support.seeds import shifted


SETTINGS = {
    "steps_per_generation": 2,
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 6,
    "temperature": 1.3,
    "rollout_lag": 1,
}


class Keeping:
    """A trainer that keeps the completions of each generation batch."""

    def _generate_rollouts(self, generation_batch):
        rollouts = super()._generate_rollouts(generation_batch)
        self.kept = [*vars(self).get("kept", []), rollouts]
        return rollouts


def trainer_of(directory, trainer_class=None, lora=False, callbacks=(), rollout_func=None, **settings):
    kept = type("Kept", (Keeping, trainer_class or PACSTrainer), {})
    more = {"train_dataset": addition_dataset(12), "eval_dataset": None if rollout_func else addition_dataset(4)}
    more |= {"callbacks": list(callbacks), "peft_config": LORA if lora else None, "rollout_func": rollout_func}
    torch.manual_seed(shifted(5))  # of the adapter
    return build_trainer(directory, trainer_class=kept, more=more, **(SETTINGS | settings))


def check_logps(trainer, recorder, lag, recomputed=False):
    """Those of each batch are of the weights from `lag` batches before, and are what the update refers to. If they are
    `recomputed`, the engine reports others, and completions without a gradient have none."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        for number, rollouts in enumerate(trainer.kept):
            weights = recorder.weights[2 * max(0, number - lag)]
            for name, parameter in policy.named_parameters():
                parameter.data.copy_(weights.get(name, parameter))
            for rollout in rollouts:
                ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
                logits = policy(input_ids=ids.long()).logits[0, len(rollout.prompt_ids) - 1 : -1] / 1.3
                logps = logits.log_softmax(-1).gather(1, ids[0, len(rollout.prompt_ids) :, None].long())[:, 0]
                recorded_logps = rollout.ref_logps if isinstance(trainer, PACSTrainer) else rollout.old_logps
                if recorded_logps is None and recomputed:
                    continue
                mask, used = torch.from_numpy(rollout.loss_mask), torch.from_numpy(recorded_logps)
                assert torch.allclose(logps[mask], used[mask], atol=1e-4), f"batch {number}"
                assert recomputed != (recorded_logps == rollout.sampling_logps).all()
