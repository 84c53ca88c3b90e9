"""A checkpoint takes the bytes that `pacs-trl plan` counts."""

import pytest
from peft import LoraConfig
from support.models import tiny_model
from support.rollouts import Replay
from support.runs import build_trainer

from pacs_trl.plan.cost import checkpoint_bytes


@pytest.mark.parametrize(
    ("settings", "lora"),
    [
        ({"reference": "snapshot"}, False),
        ({"steps_per_generation": 8}, False),
        ({"beta": 0.1, "sync_ref_model": True}, False),
        ({}, True),
    ],
)
def test_a_checkpoint_has_the_planned_size(tmp_path, settings, lora):
    """A checkpoint that is really written, of a model large enough for its weights to outweigh names and states."""
    arguments = {"num_generations": 4, "max_steps": 1, "save_strategy": "steps", "save_steps": 1} | settings
    trainer = build_trainer(
        tmp_path,
        model=tiny_model(hidden_size=256, intermediate_size=768),
        replay=Replay(),
        more={"peft_config": LoraConfig(r=64, target_modules="all-linear") if lora else None},
        optim="adamw_torch",
        **arguments,
    )
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rows = sum(len(row.completion_ids) for minibatch in trainer._waiting.minibatches for row in minibatch.rollouts)
    rows = rows if "steps_per_generation" in settings else 0
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    small = ("tokenizer", "pacs_state")  # of the miniature tokenizer, and of 64 rows of a few tokens
    written = sum(f.stat().st_size for f in checkpoint.iterdir() if not f.name.startswith(small))
    reference = 4 * trained if "sync_ref_model" in settings else 0
    planned = checkpoint_bytes(
        trained, snapshot="reference" in settings, followed_reference=reference, row_tokens=rows
    )
    assert written == pytest.approx(planned, rel=0.1)
