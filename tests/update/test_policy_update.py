"""One optimizer step of the trainer equals autograd through the loss of all its rows.

Every case trains a few updates on recorded rollouts and compares each gradient and each logged loss with the long way
in float64 (see long_way.py). 2e-5 of the norm is what rounding explains; it leaves no room for a wrong factor, mask,
label or row.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from peft import get_peft_model
from support.long_way import CORRECTION, SIZES, TWO_UPDATES, RaggedGroups, WeightedTokens, train_and_compare
from support.models import (
    LORA,
    RELATIVE,
    TOKENIZER,
    logps_and_entropies,
    relative_error,
    tiny_model,
    trainable_weights,
)
from support.rollouts import Replay, rows_of_update
from support.runs import Recorder, build_trainer
from support.seeds import shifted

from pacs_trl.pacs_trainer import PACSObjective
from pacs_trl.update.driver import UpdateDriver
from pacs_trl.update.forward_pass import CompletionLogps
from pacs_trl.update.group_loss_update import GroupLossUpdate
from pacs_trl.update.microbatching import MicroBatchConfig
from pacs_trl.update.rollout import Rollout
from pacs_trl.update.token_weights import HighEntropyTokens, Mismatch, TokenWeights


pytestmark = pytest.mark.trains


SMALL = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "pad_token_id": TOKENIZER.pad_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "bos_token_id": TOKENIZER.eos_token_id,
}
NO_DROPOUT = SMALL | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

SNAPSHOT = {**TWO_UPDATES, "reference": "snapshot"}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SMALL_MICRO_BATCHES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}

CASES = {
    "aligned": {},
    "aligned, padded": {"packing": "never"},
    "whole groups": {**TWO_UPDATES, "group_layout": "whole"},
    "whole groups, padded": {**TWO_UPDATES, "group_layout": "whole", "packing": "never"},
    "split groups": {**TWO_UPDATES, "group_layout": "split"},
    "split groups, padded": {**TWO_UPDATES, "group_layout": "split", "packing": "never"},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "two iterations of two updates": {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 5},
    "groups larger than micro-batches": {**SMALL_MICRO_BATCHES, "max_steps": 4},
    "groups larger than micro-batches, padded": {**SMALL_MICRO_BATCHES, "max_steps": 4, "packing": "never"},
    "micro-batches bounded by tokens": {**TWO_UPDATES, "max_tokens_per_micro_batch": 30, "group_layout": "split"},
    "bounded by tokens, padded": {**TWO_UPDATES, "max_tokens_per_micro_batch": 30, "packing": "never"},
    "several generations in one update": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "checkpointing": {**TWO_UPDATES, **CHECKPOINTING},
    "checkpointing, split groups": {**TWO_UPDATES, **CHECKPOINTING, "group_layout": "split"},
    "checkpointing, padded": {**TWO_UPDATES, **CHECKPOINTING, "packing": "never"},
    "snapshot": SNAPSHOT,
    "snapshot renewed every 2 steps": {**SNAPSHOT, "reference_reset_steps": 2},
    "snapshot, split groups, offloaded": {**SNAPSHOT, "group_layout": "split", "reference_offload": True},
    "mean log-probability": {**TWO_UPDATES, "proxy": "mean_logp"},
    "mean log-probability, split groups": {**TWO_UPDATES, "proxy": "mean_logp", "group_layout": "split"},
    "actor term": {**TWO_UPDATES, "actor_term_coef": 1.0},
    "actor term, split groups": {**TWO_UPDATES, "actor_term_coef": 0.5, "group_layout": "split"},
    "scaled proxies": {**TWO_UPDATES, "pacs_beta": 0.5},
}


RAGGED = {
    "per_device_train_batch_size": 16,
    "steps_per_generation": 2,
    "max_steps": 4,
    "max_tokens_per_micro_batch": 190,  # room for the padded group of nine in both generations
    "actor_term_coef": 0.5,
    "trainer_class": RaggedGroups,
}

ROWS = {
    "rows without a verdict": {"unverifiable": 0.3, "uniform_groups": 0},
    "soft labels": {"soft": True},
    "tool results": {"tools": True},
    "tool results and rows without a verdict": {"tools": True, "unverifiable": 0.3},
}
TABLE: dict[str, tuple[dict, dict]] = {name: ({}, settings) for name, settings in CASES.items()}
for layout in ("whole", "split"):
    chosen = {"group_layout": layout, **TWO_UPDATES}
    TABLE |= {f"{name}, {layout}": (rows, {"actor_term_coef": 0.5, **chosen}) for name, rows in ROWS.items()}
    for packing in ("auto", "never"):
        masked = {"mask_truncated_completions": True, "packing": packing, **chosen}
        TABLE[f"truncated and masked, {layout}, {packing}"] = ({"truncated": 0.4}, masked)
for estimator in ("rloo", "dr_grpo", "grpo", "none"):
    # The "grpo" score divides by the spread of the proxies. Large steps make it much larger than the rounding of
    # float32.
    spread = {"reference": "snapshot", "learning_rate": 0.5} if estimator == "grpo" else {}
    for weighting in ("balanced", "none", "only_positive", "only_negative")[:: 1 if estimator == "rloo" else 2]:
        chosen = {"score_estimator": estimator, "class_weighting": weighting, **spread, **TWO_UPDATES}
        TABLE[f"{estimator}, {weighting}"] = ({"unverifiable": 0.1}, chosen)
for size in (8, 4, 2, 1):  # times accumulation it stays 8, so every run learns from the same 16 rows
    chosen = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    TABLE[f"micro-batches of {size}"] = ({}, {**chosen, "steps_per_generation": 16 // size})


KL = {**TWO_UPDATES, "beta": 0.1}  # a mean over all tokens of the step, also over those of rows without a verdict
for layout in ("whole", "split"):
    bonus = {**TWO_UPDATES, "entropy_coef": 0.2, "group_layout": layout, **CHECKPOINTING}
    TABLE[f"entropy bonus, {layout}"] = ({"unverifiable": 0.4, "tools": True}, bonus)
    TABLE |= {f"KL, {layout}, {u}": ({"unverifiable": u}, {**KL, "group_layout": layout}) for u in (0.0, 0.4)}
    moved = {"uniform_groups": 1, "edit": lambda generation, rows: rows[4:12] + rows[:4] + rows[12:]}
    TABLE[f"a uniform group keeps the divisor, {layout}"] = (moved, {"group_layout": layout, **TWO_UPDATES})
for name, chosen in {
    "plain": TWO_UPDATES,
    "split, checkpointing": {**TWO_UPDATES, "group_layout": "split", **CHECKPOINTING},
    "padded": {**TWO_UPDATES, "packing": "never"},
    "snapshot": {**SNAPSHOT, "reference_reset_steps": 3},
}.items():
    TABLE[f"LoRA, {name}"] = ({}, chosen | {"peft_config": LORA})
TABLE |= {
    "ragged, KL": ({"unverifiable": 0.4}, {**RAGGED, "beta": 0.1, "group_layout": "split"}),
    # all coefficients of the update are 0, and all micro-batches are empty
    "no row counts": ({"uniform_groups": 2}, {"max_tokens_per_micro_batch": 30, "max_steps": 1}),
}


@pytest.mark.parametrize(("replay", "settings"), TABLE.values(), ids=TABLE)
def test_gradient_equals_the_long_way(tmp_path, model_path, replay, settings):
    torch.manual_seed(shifted(0))
    train_and_compare(tmp_path, Replay(**replay), model=model_path if "beta" in settings else None, **settings)


OTHERS = {
    "absolute positions": transformers.GPT2Config(**NO_DROPOUT),
    "packing fails": transformers.NemotronConfig(**SMALL, intermediate_size=64, num_key_value_heads=2),
    "state space": transformers.MambaConfig(**SMALL, state_size=8),
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_gradient_of_models_that_are_padded_equals_the_long_way(tmp_path, config):
    torch.manual_seed(shifted(0))
    model = transformers.AutoModelForCausalLM.from_config(config)
    settings = {"packing": "never"} if config.model_type == "gpt2" else {}
    trainer, _ = train_and_compare(tmp_path, Replay(), model=model, **SMALL_MICRO_BATCHES, **settings)
    assert trainer.forward_pass.packing is None


def test_a_model_that_is_padded_resumes_with_padded_micro_batches(tmp_path):
    """The startup check rejects packing, before the rest of a generation batch is scheduled again."""
    settings = {**TWO_UPDATES, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_tokens_per_micro_batch": 60, "group_layout": "split"}
    weights = []
    for resumed in (None, str(tmp_path / "checkpoint-1")):
        torch.manual_seed(shifted(0))
        model = transformers.AutoModelForCausalLM.from_config(OTHERS["packing fails"])
        trainer = build_trainer(tmp_path, model=model, replay=Replay(), **settings)
        trainer.train(resumed)
        weights.append(trainable_weights(trainer.model))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    (minibatch,) = trainer._waiting.minibatches[1:]
    for indices in minibatch.schedule[0]:
        lengths = [len(minibatch.rollouts[i].prompt_ids) + len(minibatch.rollouts[i].completion_ids) for i in indices]
        assert max(lengths) * len(lengths) <= 60


@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("group_layout", ["whole", "split"])
def test_gradient_of_groups_of_different_sizes_equals_the_long_way(tmp_path, group_layout, packing):
    settings = RAGGED | {"group_layout": group_layout, "packing": packing}
    trainer, _ = train_and_compare(tmp_path, Replay(unverifiable=0.2), **settings)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for update in range(4):
        _, rows = rows_of_update(Replay(unverifiable=0.2), trainer.args, update)
        labels = [row.label for row in rows]
        sizes, scorable = (SIZES[:4], SIZES[4:])[update % 2], []
        for start, size in zip([0, *torch.tensor(sizes).cumsum(0).tolist()], sizes):
            labeled = [label for label in labels[start : start + size] if label is not None]
            scorable += labeled if len(labeled) > 1 else []
        assert 0 < len(scorable) < 16  # empty cells of the grid are no rows
        assert logged[update]["pacs/unscorable_fraction"] == pytest.approx(1 - len(scorable) / 16)
        assert logged[update]["pacs/label_mean"] == pytest.approx(sum(scorable) / len(scorable))


@pytest.mark.parametrize("group_layout", ["whole", "split"])
def test_the_grpo_score_starts_with_the_gradient_of_dr_grpo(tmp_path, group_layout):
    """The first update on a rollout has the gradient of dr_grpo, the second one the score of grpo."""
    settings = {**TWO_UPDATES, "learning_rate": 0.5, "group_layout": group_layout, "score_estimator": "grpo"}
    train_and_compare(tmp_path / "grpo", Replay(), first_update_score="dr_grpo", **settings)
    gradients = {}
    for name in ("grpo", "dr_grpo"):
        recorder, first = Recorder(), {"first_update_score": "dr_grpo"} if name == "grpo" else {}
        chosen = settings | first | {"score_estimator": name, "max_steps": 2}
        build_trainer(tmp_path / name, replay=Replay(), more={"callbacks": [recorder]}, **chosen).train()
        gradients[name] = recorder.gradients
    first, second = (
        [torch.equal(a, gradients["dr_grpo"][update][key]) for key, a in gradients["grpo"][update].items()]
        for update in (0, 1)
    )
    assert all(first) and not any(second)


def test_gradient_of_lora_with_kl_term_equals_the_long_way(tmp_path):
    torch.manual_seed(shifted(0))
    train_and_compare(tmp_path, Replay(), model=get_peft_model(tiny_model(), LORA), beta=0.1, **TWO_UPDATES)


@pytest.mark.parametrize(
    "settings",
    [
        {"group_layout": "whole"},
        {"group_layout": "split"},
        {"group_layout": "split", "score_estimator": "none", "class_weighting": "only_positive"},
        {"reference": "snapshot"},
        {"proxy": "mean_logp"},
        {"num_iterations": 2},
    ],
    ids=["whole", "split", "rows without gradient", "snapshot", "mean log-probability", "two iterations"],
)
def test_token_weights_scale_the_gradient_only(tmp_path, settings):
    settings = CORRECTION | TWO_UPDATES | settings
    trainer, _ = train_and_compare(tmp_path, Replay(), trainer_class=WeightedTokens, **settings)
    largest = [entry.get("sampling/importance_sampling_ratio/max") for entry in trainer.state.log_history[:4]]
    assert 1.0 < largest[0] <= 2.0 + 1e-4 and largest[1] is None, largest


@pytest.mark.parametrize("reference", ["rollout", "snapshot"])
def test_token_weights_are_multiplied_and_see_the_policy_that_generated(tmp_path, reference):
    """One that always says 2 doubles the gradient of the correction. Old log-probabilities are never those of the
    snapshot."""
    settings = CORRECTION | TWO_UPDATES | {"reference": reference, "group_layout": "whole"}
    replays, recorders, seen = [Replay(uniform_groups=0) for _ in range(2)], [Recorder(), Recorder()], []

    class Double(TokenWeights):
        def __call__(self, tokens):
            assert not any(values.requires_grad for values in tokens)
            assert tokens.coefficients.shape == (len(tokens.logps), 1) and tokens.entropies.shape == tokens.mask.shape
            seen.append((trainer.state.global_step, tokens.old_logps[tokens.mask].sum().item()))
            return torch.full_like(tokens.logps, 2.0)

    for replay, recorder, more in zip(replays, recorders, ([], [Double()]), strict=True):
        arguments = {"replay": replay, "trainer_class": WeightedTokens, "more": {"callbacks": [recorder]}}
        trainer = build_trainer(tmp_path, **arguments, **settings)
        trainer.rollout_replay = replay
        trainer.update.token_weights += more
        trainer.train()
    once, twice = (recorder.gradients[0] for recorder in recorders)
    assert relative_error(twice, {name: 2 * gradient for name, gradient in once.items()}) < RELATIVE
    model = tiny_model()
    for update in range(4):
        generation, rows = rows_of_update(replays[1], trainer.args, update)
        model.load_state_dict(replays[1].weights[generation], strict=False)
        with torch.no_grad():
            expected = sum(logps_and_entropies(model, row)[0].sum().item() for row in rows)
        assert sum(old for step, old in seen if step == update) == pytest.approx(expected, rel=1e-5)


def test_mismatch_is_logged_also_without_correction(tmp_path):
    trainer = build_trainer(tmp_path, replay=Replay(), trainer_class=WeightedTokens, max_steps=1)
    trainer.rollout_replay = Replay()
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["sampling/importance_sampling_ratio/min"] < 1.0 < entry["sampling/importance_sampling_ratio/max"]
    # weights lie between 0.2 and 2
    assert 0.5 < entry["sampling/sampling_logp_difference/max"] <= math.log(5.0) + 1e-4


def test_an_evaluation_has_the_same_entropy_bonus_before_and_after_a_training_step():
    """It counts all tokens: those that a token weight selects are of the training step. Every token has one nat."""

    def compute_logps(model, prompt_ids, completion_ids):
        ones = [torch.ones(len(ids)) for ids in completion_ids]
        return CompletionLogps([-values for values in ones], ones)

    accelerator = SimpleNamespace(process_index=0, device=torch.device("cpu"), reduce=lambda sums, reduction: sums)
    forward_pass = SimpleNamespace(packing="sdpa", router_sums=None, compute_logps=compute_logps)
    driver = UpdateDriver(forward_pass, accelerator, MicroBatchConfig(num_processes=1, max_rollouts=8))
    selecting = HighEntropyTokens(0.2)
    update = GroupLossUpdate(
        driver, PACSObjective(), Mismatch("token_truncate"), token_weights=[selecting], has_entropy_bonus=True
    )
    update.entropy_coef = 0.1
    rollouts = [
        Rollout(np.zeros(4, dtype=np.int32), np.zeros(10, dtype=np.int32), np.ones(10, dtype=bool), label, group=0)
        for label in (0.0, 1.0)
    ]
    minibatch = update.schedule_evaluation(rollouts)
    results = []
    for num_selected in (None, 2):  # of 20 tokens; `prepare` of the step sets it
        selecting.num_selected = num_selected
        results.append(update.evaluate(None, minibatch, policy_is_reference=True))
    before, after = results
    assert before.mean_bonus_entropy == after.mean_bonus_entropy == pytest.approx(1.0)
    assert before.loss == after.loss == pytest.approx(math.log(2) - 0.1)


class _Saved:
    """A tensor that autograd keeps for the backward pass, and its bytes while it is kept."""

    live = peak = 0

    def __init__(self, tensor):
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        _Saved.live += self.size
        _Saved.peak = max(_Saved.peak, _Saved.live)

    def __del__(self):
        _Saved.live -= self.size


def test_memory_does_not_grow_with_the_number_of_generations(tmp_path):
    """Most bytes that autograd keeps at a time, in the first update and in one with a forward pass for the proxies."""

    def same_length(generation, rows):
        return [replace(row, prompt_ids=[1] * 8, completion_ids=[2] * 15 + [TOKENIZER.eos_token_id]) for row in rows]

    peaks = {}
    for num_generations in (8, 32):
        _Saved.live = _Saved.peak = 0
        trainer = build_trainer(
            tmp_path / str(num_generations),
            replay=Replay(num_generations=num_generations, uniform_groups=0, edit=same_length),
            num_generations=num_generations,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            steps_per_generation=16,
        )
        with torch.autograd.graph.saved_tensors_hooks(_Saved, lambda saved: saved.tensor):
            trainer.train()
        peaks[num_generations] = _Saved.peak
    assert peaks[8] > 0
    assert peaks[32] == pytest.approx(peaks[8], rel=0.05)
