"""PACS with a real vLLM engine in the trainer's process, on the CPU."""

import pytest
import torch
from support.models import trainable_weights
from support.related_methods import DarsAndGuidanceTrainer
from support.rollouts import addition_dataset
from support.runs import assert_resumes, build_trainer, spy_on
from transformers import AutoModelForCausalLM

from pacs_trl import rewards
from pacs_trl.experimental.process_labels import ProcessLabelsTrainer
from pacs_trl.experimental.steer import STEERTrainer


pytestmark = pytest.mark.trains

LEARNING = {"optim": "adamw_torch", "learning_rate": 3e-3}
LATER_DRAWS = {"adaptive_rollouts": "hardness_weighted", "max_generations": 12, "adaptive_rollouts_budget": 20}
LATER_DRAWS |= {"refill_uniform_groups": True, "max_refill_rounds": 1}
PROMPTS = [[5, 60], [200], [17, 33, 90, 4], list(range(40, 60))]


def even_start(completion_ids, **kwargs) -> list[float]:
    """Reward function that can be learnt in seconds: the first token has an even number."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def trainer_on(checkpoint, output_dir, settings, **more):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    arguments = {"train_dataset": addition_dataset(64), **more.pop("arguments", {})}
    reward = more.pop("reward", even_start)
    return build_trainer(output_dir, model=model, reward=reward, more=arguments, **(LEARNING | settings | more))


def greedy_by_engine(trainer):
    """Tokens and their log-probabilities, past the seeds that the trainer adds."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    llm = trainer.vllm_generation.llm.llm
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    drawn = [output.outputs[0] for output in outputs]
    logps = [[next(iter(token.values())).logprob for token in output.logprobs] for output in drawn]
    return [list(output.token_ids) for output in drawn], torch.tensor(logps)


@torch.no_grad()
def greedy_by_model(model):
    tokens, logps = [], []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(8):
            values, choice = model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1).max(dim=-1)
            ids.append(int(choice))
            logps.append(float(values))
        tokens.append(ids[len(prompt) :])
    return tokens, torch.tensor(logps).view(len(PROMPTS), -1)


def compare_at_every_generation(trainer):
    """Train; right after each generation, what engine and policy say. Returns (tokens agree, largest difference)."""
    found = []

    def compare(result, **kwargs):
        (of_engine, logps), (of_model, expected) = greedy_by_engine(trainer), greedy_by_model(trainer.model)
        found.append((of_engine == of_model, float((logps - expected).abs().max())))

    spy_on(trainer.vllm_generation, "generate", compare)
    trainer.train()
    return found


def test_weights_reach_the_engine_after_every_update(tmp_path, checkpoint, colocated):
    trainer = trainer_on(checkpoint, tmp_path, colocated, max_steps=6)
    found = compare_at_every_generation(trainer)
    assert len(found) == 6
    assert all(agree and difference < 1e-3 for agree, difference in found), found
    for entry in trainer.state.log_history[:6]:
        assert entry["time/weight_sync"] > 0.0
        # float32 on both sides: what remains is the order of sums
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert abs(entry["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3


def test_reward_rises(tmp_path, checkpoint, colocated):
    sizes = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 2}
    trainer = trainer_on(checkpoint, tmp_path, colocated | sizes, learning_rate=1e-2, max_steps=20)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, (
        rewards
    )  # with twenty seeds, drawn by transformers: 0.32 to 0.50


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_correction(tmp_path, checkpoint, colocated, mode):
    """Engine and trainer agree here, so the corrected run is the uncorrected one up to rounding."""
    weights = []
    for corrects in (False, True):
        correction = {"vllm_importance_sampling_correction": corrects, "vllm_importance_sampling_mode": mode}
        two_updates = {"steps_per_generation": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.05}
        trainer = trainer_on(checkpoint, tmp_path / str(corrects), colocated | correction, **two_updates)
        trainer.train()
        weights.append(trainable_weights(trainer.model))
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-5), name


def test_token_weights_and_labels_of_steps(tmp_path, checkpoint, colocated):
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


def test_stopped_and_resumed(tmp_path, checkpoint, colocated):
    """Between generations, and within one: an engine that answers the same batch again gives the same tokens."""
    settings = colocated | {"steps_per_generation": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    assert_resumes(lambda output_dir: trainer_on(checkpoint, output_dir, settings), tmp_path, 2, 3)


def test_hard_prompts_are_drawn_again(tmp_path, checkpoint, colocated):
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
