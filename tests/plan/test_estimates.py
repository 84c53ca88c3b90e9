"""`estimates.py` and the counts of `cost.py`: against what the trainer does, and by hand."""

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig
from replay import Replay, build_trainer, tiny_model

from pacs_trl.plan.check import main
from pacs_trl.plan.cost import checkpoint_bytes, model_shape, training_forward_equivalents
from pacs_trl.plan.estimates import GIB
from pacs_trl.rollouts.resume import rows_to_save
from pacs_trl.rollouts.rows import Rollout


CASES = {
    "rollout, whole": {"group_layout": "whole"},
    "rollout, split": {"group_layout": "split"},
    "rollout, whole, two iterations": {"group_layout": "whole", "num_iterations": 2},
    "rollout, split, two iterations": {"group_layout": "split", "num_iterations": 2},
    "snapshot, whole": {"group_layout": "whole", "reference": "snapshot"},
    "snapshot, split": {"group_layout": "split", "reference": "snapshot"},
    "snapshot, split, two iterations": {"group_layout": "split", "reference": "snapshot", "num_iterations": 2},
    "snapshot, corrected": {
        "group_layout": "whole",
        "reference": "snapshot",
        "vllm_importance_sampling_correction": True,
    },
    "no reference, split": {"group_layout": "split", "proxy": "mean_logp"},
    "KL term": {"group_layout": "whole", "beta": 0.1},
    "KL term, two iterations": {"group_layout": "whole", "beta": 0.1, "num_iterations": 2},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_forward_passes_are_those_of_the_trainer(tmp_path, settings):
    """One generation of 16 rows, of which each optimizer step learns from 8. A row with gradient costs 3, others 1."""
    iterations = settings.get("num_iterations", 1)
    trainer = build_trainer(
        tmp_path,
        replay=Replay(uniform_groups=0),
        more={"peft_config": LoraConfig(r=2, target_modules="all-linear")},  # the KL term needs no second model
        steps_per_generation=2,
        max_steps=2 * iterations,
        **settings,
    )
    cost = 0

    def counted(score, price):
        def spy(model, batch):
            nonlocal cost
            cost += price() * len(batch.input_ids)
            return score(model, batch)

        return spy

    update = trainer._update
    update.score = counted(update.score, lambda: 3 if torch.is_grad_enabled() else 1)
    if update.score_kl_reference is not None:
        update.score_kl_reference = counted(update.score_kl_reference, lambda: 1)
    trainer.train()
    planned = training_forward_equivalents(
        "pacs",
        checkpointing=False,
        updates=2 * iterations,
        iterations=iterations,
        reference="none" if settings.get("proxy") else settings.get("reference", "rollout"),
        split=settings["group_layout"] == "split",
        correction="vllm_importance_sampling_correction" in settings,
        kl="beta" in settings,
    )
    assert cost == 16 * planned


def test_forward_passes_of_the_baselines_by_hand():
    once = {"checkpointing": False, "updates": 1}
    assert training_forward_equivalents("grpo", **once) == 3
    assert training_forward_equivalents("grpo", **once, correction=True) == 4
    assert training_forward_equivalents("grpo", **once, kl=True) == 4
    # two iterations of two updates: the rollouts are scored once, whatever is learnt from them
    twice = {"checkpointing": True, "updates": 4, "iterations": 2}
    assert training_forward_equivalents("grpo", **twice, kl=True) == 2 * 4 + 1 + 1
    assert training_forward_equivalents("ppo", **twice, kl=True) == 2 * (2 * 4) + 1 + 1 + 1


RECIPE = {
    "method": "pacs",
    "model_name_or_path": "Qwen/Qwen3-4B",
    "dataset_name": "deepscaler",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "max_completion_length": 1000,
    "gradient_checkpointing": True,
    "max_steps": 480,
    "save_steps": 80,
}
SHAPE = model_shape("Qwen/Qwen3-4B")


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch, request):
    """Plan `RECIPE` with changes on 64 processes with FSDP2; return the line behind a word."""
    monkeypatch.chdir(request.config.rootpath)

    def run(word: str, *arguments: str, **changes) -> str:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({k: v for k, v in (RECIPE | changes).items() if v is not None}))
        launch = ("--accelerate-config", "recipes/accelerate_configs/fsdp2_8x8.yaml")
        assert main(["--config", str(recipe), *launch, *arguments]) == 0
        output = capsys.readouterr().out
        return output.split(f"  {word} ", 1)[1].split("\n", 1)[0].strip()

    return run


def hours(line: str) -> float:
    return float(line.split()[0])


class TestRun:
    def test_an_update_over_two_generations(self, planned):
        """32 accumulation steps, 16 of which make a generation: 480 updates learn from 960 generations of 8192 rows."""
        wide = {"gradient_accumulation_steps": 32}
        assert planned("rollout steps", **wide).startswith("960 (24.4 epochs of 40315 problems)")
        assert planned("completions", **wide) == "7,864,320"
        assert planned("tokens generated", "--mean-length", "500", **wide).startswith(
            "3,932.2 million at a mean of 500"
        )
        assert planned("updates", **wide) == "one optimizer step per 2 generations"
        # as long as twice as many updates over one generation each
        single = planned("all", max_steps=960, gradient_accumulation_steps=16)
        assert hours(planned("all", **wide)) == hours(single) > 0

    def test_epochs_with_an_update_over_two_generations(self, planned):
        """40315 // 1024 = 39 generations an epoch, so 20 optimizer steps, the last of them over one generation."""
        epochs = {"gradient_accumulation_steps": 32, "max_steps": None, "num_train_epochs": 3}
        assert planned("optimizer steps", **epochs) == "60"

    def test_epochs_are_counted_over_the_problems_that_are_trained_on(self, planned):
        assert planned("rollout steps", max_train_samples=2048) == "120 (60.0 epochs of 2048 problems)"
        # the held-out problems are set apart first
        both = {"max_train_samples": 2048, "eval_split_size": 1000}
        assert planned("rollout steps", **both) == "120 (60.0 epochs of 2048 problems)"
        assert planned("rollout steps", eval_split_size=315) == "120 (3.1 epochs of 40000 problems)"
        assert planned("optimizer steps", **both, max_steps=None, num_train_epochs=2) == "16"


class TestLearning:
    def passes(self, line: str) -> float:
        return float(line.split(": ")[1].split()[0])

    @pytest.mark.parametrize(
        ("settings", "passes"),
        [
            ({}, 4 + 3 / 4),  # reference of three updates of four
            ({"group_layout": "split"}, 4 + 3 / 4 + 3 / 4),
            ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 32}, 5.5),
            ({"reference": "snapshot"}, 4 + 1),
            ({"reference": "snapshot", "group_layout": "split"}, 4 + 1 + 1),
            ({"max_tokens_per_micro_batch": 9000}, 5.5),  # 8 x (1024 + 1000) tokens may not fit
            ({"max_tokens_per_micro_batch": 16192}, 4.75),
            ({"beta": 0.1}, 4.75 + 1),
            ({"num_iterations": 2}, 2 * 4 + 1),
            ({"method": "grpo"}, 4 + 1),
            ({"method": "grpo", "beta": 0.1}, 4 + 1 + 1),
            ({"method": "grpo", "gradient_accumulation_steps": 16}, 4),
            ({"method": "ppo", "beta": 0.1}, 2 * 4 + 1 + 1 + 1),
        ],
    )
    def test_forward_passes(self, planned, settings, passes):
        assert self.passes(planned("learning", **settings)) == pytest.approx(passes)


class TestMemory:
    def state(self, line: str) -> float:
        return float(line.split()[0])

    @pytest.mark.parametrize("method", ["pacs", "grpo", "ppo"])
    def test_the_kl_reference_is_a_copy_of_the_weights(self, planned, method):
        """4 bytes per weight, 1 / 64 of them on each process, besides the 16 of a trained weight."""
        models = 2 if method == "ppo" else 1
        line = planned("training state", method=method, beta=0.1)
        assert self.state(line) == pytest.approx((16 * models + 4) * SHAPE.parameters / 64 / GIB, abs=0.05)
        assert "and the KL reference" in line
        line = planned("training state", method=method)
        assert self.state(line) == pytest.approx(16 * models * SHAPE.parameters / 64 / GIB, abs=0.05)
        assert "KL" not in line

    def test_with_lora_the_kl_reference_is_the_policy_without_adapter(self, planned):
        lora = {"use_peft": True, "lora_r": 8}
        assert planned("training state", beta=0.1, **lora) == planned("training state", **lora)

    def test_snapshot(self, planned):
        with_snapshot = self.state(planned("training state", reference="snapshot"))
        assert with_snapshot == pytest.approx(20 * SHAPE.parameters / 64 / GIB, abs=0.05)
        offloaded = self.state(planned("training state", reference="snapshot", reference_offload=True))
        assert offloaded == pytest.approx(16 * SHAPE.parameters / 64 / GIB, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "lora"),
    [({}, False), ({"reference": "snapshot"}, False), ({"steps_per_generation": 8}, False), ({}, True)],
    ids=["boundary", "snapshot", "inside a generation", "LoRA"],
)
def test_checkpoint_on_disk(tmp_path, settings, lora):
    """A checkpoint that is really written, of a model large enough for its weights to outweigh names and states."""
    model = tiny_model(hidden_size=256, intermediate_size=768)
    arguments = {"num_generations": 4, "max_steps": 1, "save_strategy": "steps", "save_steps": 1} | settings
    config = LoraConfig(r=64, target_modules="all-linear") if lora else None
    trainer = build_trainer(
        tmp_path, model=model, replay=Replay(), more={"peft_config": config}, optim="adamw_torch", **arguments
    )
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rows = [len(row.completion_ids) for step in trainer._steps for row in step.rollouts]
    planned = checkpoint_bytes(
        trained, snapshot="reference" in settings, row_tokens=sum(rows) if "steps_per_generation" in settings else 0
    )
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    small = ("tokenizer", "pacs_state")  # of the miniature tokenizer, and of 64 rows of a few tokens
    written = sum(f.stat().st_size for f in checkpoint.iterdir() if not f.name.startswith(small))
    assert written == pytest.approx(planned, rel=0.1)


def test_rows_on_disk(tmp_path):
    """13 bytes a token, for completions long enough to outweigh the headers of their tensors."""
    rng = np.random.default_rng(0)
    rows = [
        Rollout(
            prompt_ids=np.zeros(100, np.int32),
            completion_ids=rng.integers(0, 1000, 4000).astype(np.int32),
            loss_mask=np.ones(4000, bool),
            label=1.0,
            ref_logps=rng.random(4000).astype(np.float32),
            sampling_logps=rng.random(4000).astype(np.float32),
        )
        for _ in range(8)
    ]
    torch.save(rows_to_save([rows], 0, 1), tmp_path / "rows.pt")
    assert (tmp_path / "rows.pt").stat().st_size == pytest.approx(checkpoint_bytes(0, row_tokens=8 * 4000), rel=0.1)
