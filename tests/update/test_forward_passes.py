"""The trainer makes the forward passes that `pacs-trl plan` counts."""

import pytest
import torch
from peft import LoraConfig
from support.rollouts import Replay
from support.runs import build_trainer, spy_on

from pacs_trl.plan.cost import exact_passes


WHOLE, SPLIT, SNAPSHOT = {"group_layout": "whole"}, {"group_layout": "split"}, {"reference": "snapshot"}
CASES = {
    "rollout, whole": WHOLE,
    "rollout, split": SPLIT,
    "rollout, whole, two iterations": WHOLE | {"num_iterations": 2},
    "rollout, split, two iterations": SPLIT | {"num_iterations": 2},
    "snapshot, whole": WHOLE | SNAPSHOT,
    "snapshot, split": SPLIT | SNAPSHOT,
    "snapshot, split, two iterations": SPLIT | SNAPSHOT | {"num_iterations": 2},
    "snapshot, corrected": WHOLE | SNAPSHOT | {"vllm_importance_sampling_correction": True},
    "no reference, split": SPLIT | {"proxy": "mean_logp"},
    "KL term": WHOLE | {"beta": 0.1},
    "KL term, two iterations": WHOLE | {"beta": 0.1, "num_iterations": 2},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_forward_passes_are_those_of_the_trainer(tmp_path, settings):
    """One generation of 16 rows, of which each optimizer step learns from 8. A row with gradient costs 3, others 1."""
    iterations = settings.get("num_iterations", 1)
    lora = {"peft_config": LoraConfig(r=2, target_modules="all-linear")}  # the KL term needs no second model
    sizes = {"steps_per_generation": 2, "max_steps": 2 * iterations, "startup_check": False}
    trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=0), more=lora, **sizes, **settings)
    # also of the reference of the KL term, which is the model without its adapter
    costs = []

    def note(scores, model, prompt_ids, completion_ids, *images, **outputs):
        costs.append((3 if torch.is_grad_enabled() else 1) * len(prompt_ids))

    spy_on(trainer.forward_pass, "forward", note)
    trainer.train()
    planned = exact_passes(
        updates=2 * iterations,
        iterations=iterations,
        reference=None if settings.get("proxy") else settings.get("reference", "rollout"),
        split=settings["group_layout"] == "split",
        correction="vllm_importance_sampling_correction" in settings,
        kl="beta" in settings,
    ).in_forward_passes("none")
    assert sum(costs) == 16 * planned
