"""Evaluation during training with a real vLLM engine on the CPU: the run does not notice it."""

import torch
from replay import addition_dataset, build_trainer, trainable_weights
from transformers import AutoModelForCausalLM

from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.callback import EvaluationCallback
from pacs_trl.evaluation.requests import SamplingSettings


def even_start(completion_ids, **kwargs) -> list[float]:
    """Reward function with both classes from the start: the first token has an even number."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def test_weights_are_bit_equal_with_and_without(tmp_path, checkpoint, colocated):
    runs = []
    for name in ("plain", "watched"):
        trainer = build_trainer(
            tmp_path / name,
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            reward=even_start,
            more={"train_dataset": addition_dataset(64)},
            **(colocated | {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 4}),
        )
        if name == "watched":
            benchmark = load_benchmark("miniature/addition", max_problems=4)
            settings = SamplingSettings(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=4)
            trainer.add_callback(
                EvaluationCallback(trainer, [benchmark], every_steps=2, n=2, settings=settings, prompt_instruction="")
            )
        trainer.train()
        logs = [
            {key: log[key] for key in ("loss", "reward", "entropy")}
            for log in trainer.state.log_history
            if "loss" in log
        ]
        runs.append((trainable_weights(trainer.model), logs))
    (weights, logs), (watched_weights, watched_logs) = runs
    assert logs == watched_logs
    assert all(torch.equal(weight, watched_weights[name]) for name, weight in weights.items())
    curve = [log for log in trainer.state.log_history if "eval_miniature/addition/pass@1" in log]
    assert [log["step"] for log in curve] == [0, 2, 4]
    assert all(0 < log["eval_miniature/addition/mean_tokens"] <= 4 for log in curve)
