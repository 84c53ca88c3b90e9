"""GenAC with one real vLLM engine in the trainer's process, which policy and critic write with in turn."""

import pytest
import torch
from support.problems import CRITIC_PROMPT
from support.rollouts import addition_dataset
from support.runs import build_trainer
from test_colocate import LEARNING, even_start, greedy_by_engine, greedy_by_model
from transformers import AutoTokenizer

from experiments.miniature.model import build_model
from pacs_trl.experimental.genac import GenACTrainer


@pytest.fixture
def trainer(tmp_path, checkpoint, colocated):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    build_model(tokenizer, "tiny", seed=1).save_pretrained(tmp_path / "critic")
    tokenizer.save_pretrained(tmp_path / "critic")
    trainer = build_trainer(
        tmp_path / "run",
        model=checkpoint,
        reward=even_start,
        trainer_class=GenACTrainer,
        more={"train_dataset": addition_dataset(64), "processing_class": tokenizer},
        critic_model_name_or_path=str(tmp_path / "critic"),
        critic_prompt=CRITIC_PROMPT,
        critic_max_new_tokens=8,
        critic_pretraining_steps=0,
        max_segments=2,
        critic_learning_rate=3e-3,
        max_steps=3,
        **(LEARNING | colocated),
    )
    trainer._critic_prompt.parse = lambda text: (
        len(text) % 11 / 10
    )  # it was never taught the tags, and has to learn something
    return trainer


def test_the_engine_has_the_weights_of_the_model_that_writes(trainer):
    """Right after each of its calls it says what that model says, and not what the other one does; its prefix cache is
    on. What it drew is learnt from at a ratio of 1."""
    engine, matches, drawn = trainer.vllm_generation, [], []
    generate, losses = engine.generate, trainer._answer_losses

    def generate_and_compare(*args, **kwargs):
        result = generate(*args, **kwargs)
        engine_ids, logps = greedy_by_engine(trainer)
        by_model = {name: greedy_by_model(model) for name, model in models.items()}
        writes = next(name for name, model in models.items() if model is engine.model)
        same = {
            name: engine_ids == ids and bool((logps - model_logps).abs().max() < 1e-3)
            for name, (ids, model_logps) in by_model.items()
        }
        matches.append((writes, [name for name, is_same in same.items() if is_same]))
        return result

    def note(answers):
        rows = ([answer[name] for answer in answers] for name in ("prompt", "ids"))
        logps = torch.cat(trainer._critic_pass.compute_logps(trainer.critic, *rows).logps)
        drawn.append((logps.detach() - torch.tensor([x for answer in answers for x in answer["logps"]])).abs().max())
        return losses(answers)

    models = {"policy": trainer.model, "critic": trainer.critic}
    engine.generate, trainer._answer_losses = generate_and_compare, note
    before = {name: [p.clone() for p in model.parameters()] for name, model in models.items()}
    trainer.train()
    assert matches == [("policy", ["policy"]), ("critic", ["critic"])] * 3
    assert drawn and max(drawn) < 1e-3
    for name, model in models.items():
        assert any(not torch.equal(old, new) for old, new in zip(before[name], model.parameters(), strict=True)), name
    assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    log = trainer.state.log_history[0]
    assert log["time/critic"] > 0 and log["genac/answer_length"] <= 8
