"""The trainer as its user meets it: zero proxies, evaluation, skipped steps, refused input, ten-line script, card."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PromptTuningConfig
from support.experts import tiny_experts
from support.models import LORA, TOKENIZER, trainable_weights
from support.rollouts import MAX_COMPLETION_LENGTH, Replay, addition_dataset, digit_reward
from support.runs import build_trainer, spy_on
from support.seeds import shifted
from transformers import TrainerCallback
from trl import GRPOTrainer

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.errors import FailedRun
from pacs_trl.update.generation import faster_generation


def logged(trainer, name: str) -> list:
    return [entry.get(name) for entry in trainer.state.log_history if "loss" in entry]


# Zero proxies -----------------------------------------------------------------------------------------------------

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
PATHS = {
    "whole": {"group_layout": "whole"},
    "split": {"group_layout": "split"},
    "whole, padded": {"group_layout": "whole", "packing": "never"},
    "split, padded": {"group_layout": "split", "packing": "never"},
    "whole, checkpointing": {"group_layout": "whole", **CHECKPOINTING},
    "split, bounded by tokens": {"group_layout": "split", "max_tokens_per_micro_batch": 30},
    "small micro-batches": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
    },
    "two iterations": {"num_iterations": 2},
    "snapshot": {"reference": "snapshot"},
    "snapshot, split": {"reference": "snapshot", "group_layout": "split"},
    "LoRA": {"more": {"peft_config": LORA}},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("settings", PATHS.values(), ids=PATHS)
def test_proxies_are_exactly_zero_while_the_policy_has_not_moved(tmp_path, settings, bf16):
    """In the first update always; in later ones (learning rate 0) because policy and reference are scored in the same
    micro-batches, so that equal weights give equal bits. Weights and log-probs are float32 under bf16, too."""
    settings = {"steps_per_generation": 2, "learning_rate": 0.0, "max_steps": 3, "bf16": bf16} | settings
    trainer = build_trainer(tmp_path, replay=Replay(unverifiable=0.1), **settings)
    dtypes = [p.dtype for p in trainer.model.parameters()]
    spy_on(
        trainer.forward_pass, "compute_logps", lambda result, *_: dtypes.extend(each.dtype for each in result.logps)
    )
    trainer.train()
    assert set(dtypes) == {torch.float32}
    assert logged(trainer, "pacs/proxy_abs_mean") == [0.0, 0.0, 0.0]
    assert logged(trainer, "pacs/score_std") == [0.0, 0.0, 0.0]


@pytest.mark.trains
@pytest.mark.parametrize(("logprobs", "without_gradient"), [(-2.0, []), (None, [4, 4])])
def test_first_update_needs_no_forward_pass_for_its_proxies(tmp_path, logprobs, without_gradient):
    """Also with weights that move: only the rows that count are computed, once. The entropy of the others is what the
    engine says, else it takes a pass without gradient."""
    settings = {"learning_rate": 0.5, "startup_check": False}
    trainer = build_trainer(tmp_path, replay=Replay(uniform_groups=1, logprobs=logprobs), **settings)
    rows = {True: [], False: []}
    note = lambda result, *_: rows[torch.is_grad_enabled()].append(len(result.logps))  # noqa: E731
    spy_on(trainer.forward_pass, "compute_logps", note)
    trainer.train()
    assert rows[True] == [4, 4]  # of 8 rows per step, 4 are in the group of one class
    assert rows[False] == without_gradient
    assert logged(trainer, "pacs/proxy_abs_mean") == [0.0, 0.0]
    assert logged(trainer, "update/forwarded_fraction") == [0.5, 0.5]


@pytest.mark.trains
@pytest.mark.parametrize(("num_generations_eval", "reference"), [(1, "rollout"), (2, "snapshot")])
def test_evaluations_log_loss_and_proxies_of_their_reference(tmp_path, num_generations_eval, reference):
    torch.manual_seed(shifted(0))
    trainer = build_trainer(
        tmp_path,
        more={"eval_dataset": addition_dataset(6)},
        num_generations_eval=num_generations_eval,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        reference=reference,
        learning_rate=0.2,
    )
    before = trainable_weights(trainer.model)
    metrics = trainer.evaluate()
    assert all(torch.equal(before[name], p) for name, p in trainable_weights(trainer.model).items())
    assert metrics["eval_reward"] == pytest.approx(metrics["eval_rewards/digit_reward/mean"])
    if num_generations_eval == 1:
        assert metrics["eval_loss"] == 0.0 and "eval_pacs/label_mean" not in metrics and metrics["eval_entropy"] > 5
    else:
        assert metrics["eval_loss"] == pytest.approx(math.log(2))  # the policy that generated is the reference
        assert metrics["eval_pacs/label_mean"] == pytest.approx(metrics["eval_reward"])
    trainer.train()
    logs = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert len(logs) == 2
    if reference == "snapshot":
        assert logs[1]["eval_pacs/proxy_abs_mean"] > 0.01
        assert logs[1]["eval_loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_the_loss_of_an_evaluation_includes_the_kl_term(tmp_path):
    """Of an adapter that is not the identity; the reference is the model without it."""
    more = {"eval_dataset": addition_dataset(6), "peft_config": LORA}
    trainer = build_trainer(tmp_path, more=more, beta=0.5, per_device_eval_batch_size=24)
    metrics = trainer.evaluate()
    assert metrics["eval_kl"] > 0.01
    assert metrics["eval_loss"] == pytest.approx(math.log(2) + 0.5 * metrics["eval_kl"])


# Steps that are skipped -------------------------------------------------------------------------------------------


def poison(trainer, steps, value=float("nan")):
    """Make the gradient of chosen steps (from 0) infinite or NaN, where a broken backward pass would."""

    def poisoned(gradient):
        if trainer.state.global_step in steps:
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
        return gradient

    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(poisoned)


class Watch(TrainerCallback):
    """Weights and optimizer state after every step."""

    def __init__(self):
        self.weights, self.optimizer = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.weights.append(trainable_weights(model))
        self.optimizer.append(copy.deepcopy(optimizer.state_dict()["state"]))


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_step_with_a_gradient_that_is_not_finite_is_skipped(tmp_path, max_grad_norm, value):
    watch = Watch()
    trainer = build_trainer(
        tmp_path,
        replay=Replay(),
        more={"callbacks": [watch]},
        max_steps=4,
        max_grad_norm=max_grad_norm,
        optim="adamw_torch",
        learning_rate=1e-3,
        weight_decay=0.1,
    )
    poison(trainer, [1, 2], value)
    trainer.train()
    assert same(watch.weights[0], watch.weights[2]) and same(watch.optimizer[0], watch.optimizer[2])
    assert not same(watch.weights[2], watch.weights[3]) and not same(watch.optimizer[2], watch.optimizer[3])
    assert logged(trainer, "update/non_finite_steps") == [0, 1, 2, 2]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_too_many_such_steps_in_a_row_stop_training(tmp_path):
    trainer = build_trainer(tmp_path, replay=Replay(), max_steps=8, max_non_finite_steps=2)
    poison(trainer, [1, 3, 4, 5])  # one alone, then three in a row
    with pytest.raises(RuntimeError, match="max_non_finite_steps=2"):
        trainer.train()
    assert trainer.state.global_step == 4


# Rewards ----------------------------------------------------------------------------------------------------------


def constant(result):
    def reward(completions, **kwargs):
        return result

    return reward


def test_labels_are_weighted_sums_from_0_to_1(tmp_path):
    functions = [constant([0.5] * 8), constant([1.0, None] * 4)]
    trainer = build_trainer(tmp_path, reward=functions, reward_weights=[0.6, 0.7], max_steps=1)
    trainer.train()
    assert logged(trainer, "pacs/label_mean") == [pytest.approx((0.3 + 1.0) / 2)]
    with pytest.raises(ValueError, match=r"1.1: reward=0.5 \(weight 0.8\), reward_2=1 \(weight 0.7\)"):
        build_trainer(tmp_path, reward=functions, reward_weights=[0.8, 0.7], max_steps=1).train()
    with pytest.raises(ValueError, match="completion 1 .*reward=-1"):
        build_trainer(tmp_path, reward=constant([0.0, -1.0, *[0.0] * 6])).train()


@pytest.mark.parametrize("max_steps", [2, 5])  # a short run ends first; a long one is stopped
def test_a_run_whose_rewards_are_all_none_fails(tmp_path, max_steps):
    trainer = build_trainer(tmp_path, reward=constant([None] * 8), max_steps=max_steps)
    before = trainable_weights(trainer.model)
    with pytest.raises(FailedRun, match=f"first {min(max_steps, 3)} generation"):
        trainer.train()
    assert same(before, trainable_weights(trainer.model))
    assert logged(trainer, "pacs/unscorable_fraction") == [1.0] * 2
    assert logged(trainer, "loss") == [0.0] * 2


def test_batches_without_rewards_are_legal_beside_others(tmp_path):
    """The only batch with rewards is the second of four; and a resumed run knows that there was one."""
    batches = []

    def late_reward(completions, **kwargs):
        batches.append(len(completions))
        return [float(i % 2) if len(batches) == 2 else None for i in range(len(completions))]

    saving = {"reward": late_reward, "save_strategy": "steps", "save_steps": 1}
    build_trainer(tmp_path, max_steps=4, **saving).train()
    assert len(batches) == 4
    build_trainer(tmp_path, max_steps=5, **saving).train(str(tmp_path / "checkpoint-4"))
    assert len(batches) == 5
    batches[:] = [0] * 9  # no reward from here on
    with pytest.raises(FailedRun, match="first 2 generation batches"):
        build_trainer(tmp_path / "none", max_steps=2, **saving).train()
    with pytest.raises(FailedRun, match="first 3 generation batches"):
        build_trainer(tmp_path / "none", max_steps=9, **saving).train(str(tmp_path / "none" / "checkpoint-2"))


def test_reward_functions_are_told_what_is_truncated(tmp_path):
    told = []

    def reward(completions, completion_ids, truncated, **kwargs):
        assert truncated == [ids[-1] != TOKENIZER.eos_token_id for ids in completion_ids]
        told.extend(truncated)
        return [float(cut) for cut in truncated]

    def rollout(prompts, trainer):
        ends = [TOKENIZER.eos_token_id, 5, 6, TOKENIZER.eos_token_id]
        ids = [[4, ends[i % 4]] for i in range(len(prompts))]
        return {"prompt_ids": [[3]] * len(ids), "completion_ids": ids, "logprobs": [[0.0, 0.0]] * len(ids)}

    more = {"train_dataset": addition_dataset(32).to_iterable_dataset()}  # which trains like others
    trainer = build_trainer(tmp_path, reward=reward, replay=rollout, max_steps=1, more=more)
    trainer.train()
    assert set(told) == {True, False}
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == trainer.state.log_history[0]["reward"] == 0.5


# Other models ----------------------------------------------------------------------------------------------------


def test_prompt_tuning_trains_and_generates_with_its_virtual_tokens(tmp_path):
    """It has no target modules, and fast generation reads its virtual tokens, too."""
    peft = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    trainer = build_trainer(tmp_path, more={"peft_config": peft}, fast_generation=True, max_steps=1)
    before = trainable_weights(trainer.model)
    trainer.train()
    assert any(not torch.equal(weight, before[n]) for n, weight in trainable_weights(trainer.model).items())
    inputs = {"input_ids": torch.tensor([[5, 6, 7]] * 2), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    with torch.no_grad():
        trainer.model.prompt_encoder.default.embedding.weight.mul_(100)
    written = [trainer.model.generate(**inputs, max_new_tokens=8, do_sample=False)]
    with faster_generation(trainer.model, fast=True, dtype=None):
        written.append(trainer.model.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert torch.equal(*written)


@pytest.mark.trains
def test_experts_and_routers_of_a_mixture_are_trained(tmp_path):
    settings = {"steps_per_generation": 2, "router_aux_loss_coef": 0.0, "learning_rate": 0.01}
    trainer = build_trainer(tmp_path, model=tiny_experts(), **settings)
    assert trainer.forward_pass.packing == "sdpa"
    before = trainable_weights(trainer.model)
    trainer.train()
    after = trainable_weights(trainer.model)
    moved = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    assert any("experts" in name for name in moved) and any("mlp.gate" in name for name in moved)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2 and logs[1]["pacs/proxy_abs_mean"] > 0


# Empty completions ------------------------------------------------------------------------------------------------


def emptied(token_ids):
    def edit(generation, rows):
        for row in rows[5:7]:
            row.completion_ids = list(token_ids)
            row.env_mask = [1] * len(token_ids)
        return rows

    return edit


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("mask_truncated_completions", [False, True])
@pytest.mark.parametrize("packing", ["auto", "never"])
def test_empty_completions_of_a_rollout_function_count_as_an_end_token(
    tmp_path, packing, mask_truncated_completions, tools
):
    """No token at all counts as the end-of-sequence token alone."""
    settings = {
        "packing": packing,
        "mask_truncated_completions": mask_truncated_completions,
        "steps_per_generation": 2,
    }
    weights = []
    for token_ids in ([], [TOKENIZER.eos_token_id]):
        replay = Replay(uniform_groups=0, tools=tools, edit=emptied(token_ids))
        trainer = build_trainer(tmp_path, replay=replay, **settings)
        trainer.train()
        weights.append(trainable_weights(trainer.model))
        assert logged(trainer, "completions/empty_ratio")[0] == (2 / 16 if not token_ids else 0.0)
        assert logged(trainer, "completions/min_length")[0] >= 0
    assert same(*weights)


def test_empty_completions_of_an_engine_are_counted_and_trained(tmp_path, monkeypatch):
    """An engine that strips the end-of-sequence token: TRL indexes the last token of every completion."""
    trainer = build_trainer(tmp_path, max_steps=1)
    generate = GRPOTrainer._generate_single_turn

    def stripped(self, *args, **kwargs):
        completion_ids, logprobs = generate(self, *args, **kwargs)
        return [[] if i == 3 else ids for i, ids in enumerate(completion_ids)], logprobs

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", stripped)
    trainer.train()
    assert logged(trainer, "completions/empty_ratio") == [1 / 8]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_weights_do_not_change_if_all_completions_are_truncated_and_masked(tmp_path):
    def cut(generation, rows):
        for row in rows:
            row.completion_ids = [2] * MAX_COMPLETION_LENGTH
        return rows

    replay = Replay(truncated=1.0, edit=cut)
    trainer = build_trainer(tmp_path, replay=replay, mask_truncated_completions=True)
    before = trainable_weights(trainer.model)
    trainer.train()
    assert same(before, trainable_weights(trainer.model))
    assert logged(trainer, "pacs/unscorable_fraction") == [1.0, 1.0]


README = Path(__file__).parent.parent / "README.md"
# The script of README, with a model and a dataset that are here and sizes that take seconds on a CPU.
REPLACEMENTS = {
    '"Qwen/Qwen3-0.6B"': '"model"',
    'load_dataset("trl-lib/DeepMath-103K", split="train")': "DATASET",
    "max_completion_length=1024": "max_completion_length=8, use_cpu=True, bf16=False",
    "max_steps=100": "max_steps=2, save_steps=2",
}


def test_the_script_of_readme_trains(model_path, monkeypatch):
    script = README.read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in script.splitlines() if line]) <= 7
    for old, new in REPLACEMENTS.items():
        assert script.count(old) == 1, f"README's script has no {old}"
        script = script.replace(old, new)
    monkeypatch.chdir(Path(model_path).parent)
    exec(script, {"__name__": "__main__", "DATASET": addition_dataset(16)})
    assert (Path(model_path).parent / "outputs" / "deepmath" / "checkpoint-2" / "model.safetensors").is_file()


def test_a_model_instance_trains_with_default_settings(model_path, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    @dataclass
    class OnCPU(PACSConfig):  # TRL's own default, bf16 on an accelerator, does not run here
        use_cpu: bool = True

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PACSTrainer, "_config_class", OnCPU)
    model = AutoModelForCausalLM.from_pretrained(model_path, max_position_embeddings=1024)  # 512 are one completion
    trainer = PACSTrainer(model, digit_reward, train_dataset=addition_dataset(64))
    assert trainer.args.output_dir == "model-PACS" and trainer.args.num_generations == 8
    assert trainer.processing_class.eos_token == TOKENIZER.eos_token
