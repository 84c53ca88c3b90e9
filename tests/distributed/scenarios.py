"""Scenarios of `test_two_processes.py`; see `support/two_processes.py`."""

import os
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support.experts import tiny_experts
from support.fake_llm import SleepingLLM, play_colocated
from support.long_way import CORRECTION, RaggedGroups
from support.models import LORA, TOKENIZER, tiny_model, trainable_weights
from support.problems import held_out as held_out_problems
from support.rollouts import Parity, Replay, addition_dataset, digit_reward
from support.runs import Recorder, build_trainer, spy_on
from support.seeds import shifted
from support.sharding import FSDP_SETTINGS, full, zero3_settings
from support.two_processes import EIGHTH, HALF, QUARTER, Sampled, record, resumed
from torch.distributed.fsdp import FSDPModule
from trl.generation import vllm_generation

from pacs_trl import GRPOTrainer, PACSTrainer, PPOTrainer
from pacs_trl.rollouts import evaluation
from pacs_trl.update import compiled_layers


# 32 rows per generation, as groups of 1 to 9.
RAGGED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_tokens_per_micro_batch": 190,
    "max_steps": 4,
    "trainer_class": RaggedGroups,
}

REPLAYED: dict[str, tuple[dict, dict]] = {  # settings, settings of the replay
    "2 rows x 2": (QUARTER, {}),
    "1 row x 4": (EIGHTH, {}),
    "padded, idle process": ({**HALF, "packing": "never"}, {"uniform_groups": 3}),
    "whole groups": ({**HALF, "group_layout": "whole"}, {}),
    "split groups, no verdicts, tools": ({**HALF, "group_layout": "split"}, {"unverifiable": 0.3, "tools": True}),
    "two iterations": ({**QUARTER, "num_iterations": 2, "max_steps": 4}, {}),
    "bounded by tokens": ({**HALF, "max_tokens_per_micro_batch": 30}, {}),
    "truncated and masked": ({**QUARTER, "mask_truncated_completions": True}, {"truncated": 0.4}),
    "snapshot, renewed": ({**QUARTER, "reference": "snapshot", "reference_reset_steps": 2, "max_steps": 4}, {}),
    "entropy bonus, idle process": ({**HALF, "entropy_coef": 0.2, "max_steps": 4}, {"uniform_groups": 3}),
    "actor term, mean log-probability": ({**HALF, "actor_term_coef": 1.0, "proxy": "mean_logp"}, {}),
    "clipped": ({**HALF, "max_grad_norm": 0.5}, {}),
    "LoRA": ({**QUARTER, "peft_config": LORA}, {}),
    "ragged, whole": ({**RAGGED, "group_layout": "whole"}, {"unverifiable": 0.2}),
    "ragged, split": ({**RAGGED, "group_layout": "split"}, {"unverifiable": 0.2}),
}


def zero_proxies(rank, directory):
    settings = {**QUARTER, "learning_rate": 0.0, "bf16": True}
    return [e["pacs/proxy_abs_mean"] for e in record(directory, settings, {})["logs"]]


def not_finite(rank, directory):
    """A gradient of one process is NaN in the second step."""
    recorder = Recorder()
    trainer = build_trainer(directory, replay=Replay(), max_steps=3, more={"callbacks": [recorder]}, **HALF)

    def poisoned(gradient):
        return gradient * float("nan") if rank == 1 and trainer.state.global_step == 1 else gradient

    trainer.model.get_parameter("model.norm.weight").register_hook(poisoned)
    trainer.train()
    return {
        "weights": recorder.weights,
        "count": [e["update/non_finite_steps"] for e in trainer.state.log_history if "loss" in e],
    }


def message_of(run) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "no error"


def too_few_tokens(rank, directory):
    def longer(generation, rows):
        rows[-1].prompt_ids = [1] * 20  # a row of the second process
        rows[-1].completion_ids = [2] * 16
        return rows

    trainer = build_trainer(directory, replay=Replay(edit=longer), max_tokens_per_micro_batch=30, **HALF)
    return message_of(trainer.train)


def different_datasets(rank, directory):
    dataset = addition_dataset(32 + rank)
    return message_of(lambda: build_trainer(directory, more={"train_dataset": dataset}, **HALF))


def shuffled_datasets(rank, directory):
    dataset = addition_dataset(32).shuffle(seed=rank)
    return message_of(lambda: build_trainer(directory, more={"train_dataset": dataset}, **HALF))


def different_checkpoints(rank, directory):
    last = [directory / "checkpoint-4", None][rank]
    return message_of(lambda: build_trainer(directory, **HALF).train(resume_from_checkpoint=last))


def label_out_of_range(rank, directory):
    def reward(completions, **kwargs):
        return [2.0 * rank] * len(completions)

    return message_of(build_trainer(directory, reward=reward, **HALF).train)


def resumed_snapshot(rank, directory, **how):
    """In the middle of a generation, where the snapshot is renewed, and at its border."""
    return resumed(rank, directory, reference="snapshot", reference_reset_steps=3, steps=(3, 4), **how)


def resumed_reference(rank, directory, **how):
    """A KL reference that follows the policy, in the middle of a generation."""
    if rank == 0:
        tiny_model().save_pretrained(directory / "model")
    torch.distributed.barrier()
    settings = {"trainer_class": GRPOTrainer, "model": str(directory / "model"), "beta": 0.1, "sync_ref_model": True}
    settings |= {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.9, "max_steps": 4}
    return resumed(rank, directory, steps=(3,), **settings | how)


def corrected(rank, directory, **how):
    """The correction of log-probs that an engine gives."""
    settings = HALF | CORRECTION | {"group_layout": "split", "max_steps": 4} | how
    return record(directory, settings, {}, replay_class=Sampled)


def benchmarks(rank, directory, **how):
    """Greedy completions of five problems, which two processes share, and the weights after two steps."""
    settings = {"eval_benchmarks": [held_out_problems()], "eval_max_problems": 5, "eval_num_samples": 1}
    settings |= {"eval_temperature": 0.0, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    with patch.object(evaluation, "shared_verifier", Parity):
        trainer = build_trainer(directory, **HALF | settings | how)
        trainer.train()
    logs = [e for e in trainer.state.log_history if "eval_pass@1" in e]
    return [{k: v for k, v in e.items() if "pass@1" in k or "addition" in k} for e in logs]


def numbered(prompts, trainer):
    """Completions of a prompt that differ in length."""
    texts = [f"{prompt[-1]['content']}{'x' * (i % 4)}" for i, prompt in enumerate(prompts)]
    ids = [TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] for text in texts]
    return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": ids, "logprobs": None}


def empty_completions(rank, directory):
    """Only the second process generates completions without a token: three of the 16 of a batch."""

    def emptied(generation, rows):
        for row in rows[9:12]:
            row.completion_ids = []
        return rows

    logs = record(directory, HALF, {"edit": emptied})["logs"]
    return logs[0]["completions/empty_ratio"]


def held_out(rank, directory, **how):
    """An evaluation on five prompts with four completions each: two processes repeat three prompts."""

    def reward(prompts, completion_ids, **kwargs):
        return [(len(str(prompt)) + 3 * len(ids)) % 7 / 7 for prompt, ids in zip(prompts, completion_ids)]

    settings = {"per_device_eval_batch_size": 8, "loss_type": "dapo", "top_entropy_quantile": 0.5} | how
    more = {"eval_dataset": addition_dataset(5), "rollout_func": numbered, "peft_config": LORA}
    arguments = {"reward": reward, "trainer_class": GRPOTrainer, "more": more, "beta": 0.1}
    torch.manual_seed(shifted(0))  # of the adapter
    metrics = build_trainer(directory, **HALF | arguments | settings).evaluate()
    names = ("eval_loss", "eval_kl", "eval_entropy", "eval_reward", "eval_reward_std", "eval_rewards/reward/mean")
    return {name: metrics[name] for name in names}


def drawn_again(rank, directory, **how):
    """Each process draws eight more of one of its prompts, and its rewards ask for another number of
    log-probabilities."""
    drawn, logps = [], []

    class DrawsAgain(PACSTrainer):
        def _generate_rollouts(self, generation_batch):
            first = super()._generate_rollouts(generation_batch)
            drawn.append(first + self.generate_more(generation_batch[:1], 8, [first[0].group]))
            return drawn[-1]

    def reward(completions, compute_logps, **kwargs):
        rows = [[7, i] for i in range(9 * rank)]  # three passes of four rows on one process, none on the other
        logps.append(compute_logps([[1, 2, 3]] * len(rows), rows))
        return digit_reward(completions)

    trainer = build_trainer(directory, reward=reward, trainer_class=DrawsAgain, **HALF, **how)
    trainer.train()
    groups = [[row.group for row in rows] for rows in drawn]
    return {"groups": groups, "logps": logps[0], "final": trainable_weights(trainer.model)}


def asleep(rank, directory, **how):
    """A colocated engine sleeps between generations, and gets LoRA merged: its weights at last, and what they should
    be. Nothing of the base model changes."""
    more = {"train_dataset": addition_dataset(64), "peft_config": LORA}
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patched:
        settings = HALF | play_colocated(patched) | {"vllm_enable_sleep_mode": True} | how
        settings |= {"learning_rate": 0.5, "max_steps": 4}
        patched.setattr(vllm_generation, "LLM", SleepingLLM)
        os.environ.update(environment)  # of the launcher, which accelerate reads
        torch.manual_seed(shifted(0))  # of the adapter
        trainer = build_trainer(directory, more=more, **settings)
        os.environ.update(environment)  # the engine has removed it
        trainer.train()
        trainer.vllm_generation.sync_weights()
    engine = trainer.vllm_generation.llm.llm
    weights = {name: full(p) for name, p in trainer.model.named_parameters() if p.requires_grad}
    expected = dict(tiny_model().named_parameters())
    for name in expected:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.default.weight" in weights:
            product = weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"]
            expected[name] = expected[name] + LORA.lora_alpha / LORA.r * product
    return {"sent": dict(engine.model.named_parameters()), "expected": expected, "calls": engine.calls}


# Two minibatches of 8 completions, each used twice, with active clips on both sides.
GRPO = {**HALF, "num_iterations": 2, "max_steps": 8, "epsilon": 0.01, "epsilon_high": 0.02}


def grpo(rank, directory, **how):
    recorded = record(directory, GRPO | how, {"unverifiable": 0.2}, trainer_class=GRPOTrainer)
    return {name: recorded[name] for name in ("final", "logs")}


def experts(rank, directory, **how):
    """A mixture of experts with the loss of its routers. All completions fit into one micro-batch, so that the second
    process has none."""
    settings = {"router_aux_loss_coef": 1.0, "packing": "never", "max_tokens_per_micro_batch": 2000}
    settings |= HALF | {"model": tiny_experts(), "learning_rate": 0.01, "max_steps": 4}
    recorded = record(directory, settings | how, {"uniform_groups": 2}, trainer_class=GRPOTrainer)
    return {name: recorded[name] for name in ("final", "logs", "gradients")}


def replayed(rank, directory, name, **how):
    settings, replay = REPLAYED[name]
    return record(directory, {**settings, **how}, replay)


BY_ALL = {"corrected": corrected, "grpo": grpo, "asleep": asleep}  # by all kinds
BY_ALL |= {"resumed reference": resumed_reference}
GENERATING = {"drawn again": drawn_again, "benchmarks": benchmarks}
DDP = {name: partial(replayed, name=name) for name in REPLAYED} | BY_ALL | GENERATING
DDP |= {
    "experts": experts,
    "held out": held_out,
    "zero proxies": zero_proxies,
    "empty completions": empty_completions,
    "not finite": not_finite,
    "too few tokens": too_few_tokens,
    "different datasets": different_datasets,
    "shuffled datasets": shuffled_datasets,
    "different checkpoints": different_checkpoints,
    "label out of range": label_out_of_range,
    "resumed": resumed,
    "resumed snapshot": resumed_snapshot,
}
SHARDED = (
    "2 rows x 2",
    "padded, idle process",
    "split groups, no verdicts, tools",
    "bounded by tokens",
    "snapshot, renewed",
    "clipped",
)
FSDP2 = {name: partial(replayed, name=name, **FSDP_SETTINGS) for name in SHARDED} | {
    name: partial(scenario, **FSDP_SETTINGS)
    for name, scenario in (BY_ALL | GENERATING | {"resumed snapshot": resumed_snapshot}).items()
}


def more_than_bf16(tensor) -> bool:
    return not torch.equal(tensor, tensor.bfloat16().to(tensor.dtype))


def exchanged_in_bf16(rank, directory):
    """PACS, GRPO, and PPO under bf16: what crosses FSDP2's borders in which precision."""
    logps, recorder, settings = [], Recorder(), {**EIGHTH, **FSDP_SETTINGS, "bf16": True}
    trainer = build_trainer(directory, replay=Replay(), more={"callbacks": [recorder]}, **settings)
    spy_on(trainer.forward_pass, "compute_logps", lambda scores, *rows: logps.extend(scores.logps))
    trainer.train()
    if rank == 0:
        tiny_model().save_pretrained(directory / "model")
    torch.distributed.barrier()
    models = {"pacs policy": trainer.model_wrapped}
    for name, trainer_class in {"grpo": GRPOTrainer, "ppo": PPOTrainer}.items():
        path = str(directory / "model")
        trainer = build_trainer(
            directory / name, model=path, trainer_class=trainer_class, **settings | {"max_steps": 1}
        )
        trainer.train()
        models[f"{name} policy"] = trainer.model_wrapped
        if name == "ppo":
            models["ppo critic"] = trainer.critic
    policies = {}
    for name, model in models.items():
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        policies[name] = {state._mp_policy for state in states}
    return {
        "logps": all(map(more_than_bf16, logps)),
        "gradients": [any(map(more_than_bf16, g.values())) for g in recorder.gradients],
        "policies": policies,
    }


def units_of_kl_model(rank, directory):
    """The modules of the model of the KL term that FSDP2 gathers as one."""
    trainer = build_trainer(directory, trainer_class=GRPOTrainer, **HALF | FSDP_SETTINGS, beta=0.1)
    return [name for name, module in trainer.ref_model.named_modules() if isinstance(module, FSDPModule)]


FSDP2["exchanged in bf16"] = exchanged_in_bf16
FSDP2["units of the KL model"] = units_of_kl_model
# Parameters below the threshold stay gathered between uses: none of this model's, or all.
GATHERED = [(name, 0) for name in SHARDED] + [("2 rows x 2", 100_000), ("snapshot, renewed", 100_000)]
ZERO3 = {
    f"{name}, {threshold}": partial(replayed, name=name, **zero3_settings(threshold)) for name, threshold in GATHERED
}
ZERO3 |= {name: partial(scenario, **zero3_settings(0)) for name, scenario in BY_ALL.items()}
ZERO3 |= {"resumed snapshot": partial(resumed_snapshot, **zero3_settings(0))}


COMPILED = REPLAYED["snapshot, renewed"][0] | {"compile_layers": True, "gradient_checkpointing": True}


def compiled(rank, directory, **how):
    compiled_layers.BACKEND = "aot_eager"
    return record(directory, {**COMPILED, **how}, {}) | {"graphs": compiled_layers.num_graphs()}


SCENARIOS = {"ddp": DDP, "fsdp2": FSDP2, "zero3": ZERO3, "compiled, ddp": {"compiled": compiled}}
SCENARIOS |= {"compiled, fsdp2": {"compiled": partial(compiled, **FSDP_SETTINGS)}}
