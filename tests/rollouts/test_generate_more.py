"""Drawing again inside one generation, for some of its prompts and with another number; rewards that need the
policy."""

import pytest
import torch
from support.models import TOKENIZER, assert_same_models, tiny_model, trainable_weights
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer
from support.seeds import shifted

from pacs_trl import GRPOTrainer, PACSTrainer, PPOTrainer
from pacs_trl.rollouts.request_seeds import request_seed


class DrawsAgain(PACSTrainer):
    """Four prompts get four completions each, then two of them eight more."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn = []

    def _generate_rollouts(self, generation_batch):
        first = super()._generate_rollouts(generation_batch)
        again = slice(1, None, 2)
        prompts, groups = generation_batch[::4][again], [row.group for row in first[::4]][again]
        self.drawn.append(first + self.generate_more(prompts, 8, groups))
        assert self.num_generations == 4
        return self.drawn[-1]


def trained(output_dir, model_path, settings, resume=None):
    trainer = build_trainer(
        output_dir,
        trainer_class=DrawsAgain,
        model=model_path,
        more={"train_dataset": addition_dataset(64)},
        **settings,
        **{"learning_rate": 3e-3, "optim": "adamw_torch", "steps_per_generation": 2, "max_steps": 4},
        **{"save_strategy": "steps", "save_steps": 1},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_rows(rows):
    """Groups of 4 and 12; the prompts differ; every row has the label of its completion."""
    groups = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
        text = TOKENIZER.decode(row.completion_ids, skip_special_tokens=True)
        assert [row.label] == digit_reward([[{"content": text}]])
    assert sorted(map(len, groups.values())) == [4, 4, 12, 12] and len(rows) == 32
    prompts = [{tuple(row.prompt_ids) for row in group} for group in groups.values()]
    assert all(len(prompt) == 1 for prompt in prompts) and len(set.union(*prompts)) == 4


@pytest.mark.trains
def test_a_second_generation_of_some_prompts_resumes_bit_by_bit(tmp_path, model_path, engine):
    settings, requests = engine
    straight = trained(tmp_path / "straight", model_path, settings)
    assert len(straight.drawn) == 2
    for rows in straight.drawn:
        check_rows(rows)
    assert not {row.group for row in straight.drawn[0]} & {row.group for row in straight.drawn[1]}
    asked = requests(straight) if requests else []
    seeds = [request_seed(f"{shifted(42)}/{batch}/1", i) for batch in range(4) for i in range(16)]
    if settings.get("vllm_mode") == "colocate":  # one request per completion
        assert [seed for _, _, seed in asked] == seeds
        assert [ids for _, ids, _ in asked[16:32]] == [asked[i][1] for i in (4, 12) for _ in range(8)]
    elif requests:  # one call per draw, which the server answers with n completions of each prompt
        assert [(n, seed) for n, _, seed in asked] == [
            (n, seeds[first])
            for first, n, size in ((0, 4, 4), (16, 8, 2), (32, 4, 4), (48, 8, 2))
            for _ in range(size)
        ]
    for step in (1, 2, 3):
        resumed = trained(
            tmp_path / "resumed", model_path, settings, str(tmp_path / "straight" / f"checkpoint-{step}")
        )
        assert_same_models(straight, resumed)
        if requests:
            assert requests(resumed) == [each for each in asked if seeds.index(each[2]) >= (64 if step == 3 else 32)]
    history = [entry for entry in straight.state.log_history if "loss" in entry]
    assert history[1]["pacs/proxy_abs_mean"] > 0 and history[0]["time/generation"] > 0 == history[1]["time/generation"]


@pytest.mark.trains
@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer, PPOTrainer])
def test_a_reward_may_ask_for_the_policys_log_probabilities(tmp_path, model_path, trainer_class):
    seen = []

    def likely(prompts, completion_ids, compute_logps, **kwargs):
        """More rows than one pass holds, of different lengths, one of them without any token."""
        ids = [TOKENIZER(prompt[0]["content"])["input_ids"] for prompt in prompts]
        rows = [[*completion_ids[0], 7], [], *completion_ids]
        logps = compute_logps([ids[0], ids[0], *ids], rows)
        seen.append((ids, rows, logps, trainable_weights(trainer.model)))
        return [float(each.mean().exp()) for each in logps[2:]]

    settings = {"temperature": 0.7, "learning_rate": 0.01, "reward_weights": [0.5, 0.5], "max_completion_length": 8}
    arguments = {"model": model_path, "reward": [likely, digit_reward], "trainer_class": trainer_class}
    trainer = build_trainer(tmp_path, **arguments, **settings)
    trainer.train()
    assert len(seen) == 2 and trainer.state.global_step == 2
    for ids, rows, logps, weights in seen:
        model = tiny_model()
        model.load_state_dict(weights, strict=False)
        assert [len(each) for each in logps] == [len(row) for row in rows] and not any(
            each.requires_grad for each in logps
        )
        for prompt, row, row_logps in zip([ids[0], ids[0], *ids], rows, logps):
            logits = model(torch.tensor([[*prompt, *row]])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(row, dtype=torch.long)[:, None])[:, 0]
            torch.testing.assert_close(row_logps, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(seen[0][2][0], seen[1][2][0])
