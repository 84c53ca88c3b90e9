"""PACS with a real vLLM engine in the trainer's process, on the CPU."""

import pytest
import torch
from support.models import trainable_weights
from support.rollouts import addition_dataset
from support.runs import assert_resumes, build_trainer, spy_on
from transformers import AutoModelForCausalLM


pytestmark = pytest.mark.trains

LEARNING = {"optim": "adamw_torch", "learning_rate": 3e-3}
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
    comparisons = []

    def compare(result, **kwargs):
        (engine_ids, logps), (model_ids, expected) = greedy_by_engine(trainer), greedy_by_model(trainer.model)
        comparisons.append((engine_ids == model_ids, float((logps - expected).abs().max())))

    spy_on(trainer.vllm_generation, "generate", compare)
    trainer.train()
    return comparisons


def test_weights_reach_the_engine_after_every_update(tmp_path, checkpoint, colocated):
    trainer = trainer_on(checkpoint, tmp_path, colocated, max_steps=6)
    comparisons = compare_at_every_generation(trainer)
    assert len(comparisons) == 6
    assert all(agree and difference < 1e-3 for agree, difference in comparisons), comparisons
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
def test_the_correction_changes_nothing_where_engine_and_trainer_agree(tmp_path, checkpoint, colocated, mode):
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


def test_a_stopped_run_resumes_bit_by_bit(tmp_path, checkpoint, colocated):
    """Between generations, and within one: an engine that answers the same batch again gives the same tokens."""
    settings = colocated | {"steps_per_generation": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    assert_resumes(lambda output_dir: trainer_on(checkpoint, output_dir, settings), tmp_path, 2, 3)
