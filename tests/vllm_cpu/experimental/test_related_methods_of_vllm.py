"""Related methods with a real vLLM engine in the trainer's process: token weights, labels of steps, later rollouts."""

import pytest
import torch
from support.related_methods import DarsAndGuidanceTrainer
from support.rollouts import addition_dataset
from support.runs import assert_resumes
from test_colocate import trainer_on

from pacs_trl import rewards
from pacs_trl.experimental.process_labels import ProcessLabelsTrainer
from pacs_trl.experimental.steer import STEERTrainer


pytestmark = pytest.mark.trains

LATER_DRAWS = {"adaptive_rollouts": "hardness_weighted", "max_generations": 12, "adaptive_rollouts_budget": 20}
LATER_DRAWS |= {"refill_uniform_groups": True, "max_refill_rounds": 1}


def test_token_weights_and_labels_of_steps_reach_the_loss(tmp_path, checkpoint, colocated):
    """STEER beside the correction of what the engine says; labels in two places beside verdicts."""

    def even_tokens(completion_ids, **kwargs):
        labels = [[(t, float(ids[t] % 2 == 0)) for t in sorted({0, len(ids) - 1})] for ids in completion_ids]
        return [pairs if i % 5 else None for i, pairs in enumerate(labels)]

    updates = colocated | {"steps_per_generation": 2, "max_steps": 4, "vllm_importance_sampling_correction": True}
    steered = trainer_on(checkpoint, tmp_path / "steer", updates, trainer_class=STEERTrainer)
    steered.train()
    logs = [entry for entry in steered.state.log_history if "loss" in entry]
    assert all(0.8 <= entry["steer/weight_mean"] <= 1 for entry in logs)
    functions = [rewards.math_reward, even_tokens]
    judged = trainer_on(checkpoint, tmp_path / "steps", updates, reward=functions, trainer_class=ProcessLabelsTrainer)
    judged.train()
    logs = [entry for entry in judged.state.log_history if "loss" in entry]
    assert all(0 < entry["process/label_mean"] < 1 for entry in logs)
    assert [entry["pacs/proxy_abs_mean"] > 0 for entry in logs] == [False, True] * 2


def test_later_rollouts_of_hard_prompts_resume_bit_identically(tmp_path, checkpoint, colocated):
    """All later draws with a real engine: other seeds for every completion, and the same run from every step."""

    def rarely(completion_ids, prompts, **kwargs):
        chances = [1 if "7" in str(prompt) else 2 if "Hint" in str(prompt) else 9 for prompt in prompts]
        return [float(sum(ids) % chance == 0) for ids, chance in zip(completion_ids, chances)]

    data = addition_dataset(64).map(lambda row: {"hint": "Count."})
    settings = colocated | {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    settings |= LATER_DRAWS | {"guidance": "hint", "reward": rarely, "trainer_class": DarsAndGuidanceTrainer}
    settings["arguments"] = {"train_dataset": data}
    straight, again = assert_resumes(
        lambda output_dir: trainer_on(checkpoint, output_dir, {}, **settings), tmp_path, 1, 2
    )
    for trainer in (straight, again):
        groups = {}
        for row in (row for update in trainer._waiting.minibatches for row in update.rollouts):
            groups.setdefault(row.group, []).append(row)
        assert all(len({tuple(row.completion_ids) for row in rows}) > len(rows) // 2 for rows in groups.values())
        guided = [row for rows in groups.values() for row in rows if "guided" in row.extra]
        assert all(torch.tensor(row.sampling_logps).isnan().all() for row in guided)
    for name in ("adaptive/additional", "guidance/attempted", "refill/prompts"):
        assert sum(entry.get(name, 0) for entry in straight.state.log_history) > 0, name
