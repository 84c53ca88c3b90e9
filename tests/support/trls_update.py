"""Runs on the same recorded completions by TRL's trainers and by those on the exact update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest.mock import patch

import torch
import trl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from trl.trainer.utils import shuffle_sequence_dict

from pacs_trl import GRPOTrainer, RLOOTrainer
from pacs_trl.baselines.grpo_config import GRPOConfig, RLOOConfig
from pacs_trl.rollouts.request_seeds import request_seed
from pacs_trl.update.minibatch import split_into_minibatches
from support.models import LORA, TOKENIZER, tiny_model, trainable_weights
from support.rollouts import Replay, addition_dataset, stored_label
from support.runs import Recorder, config
from support.seeds import shifted


OWN = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
TRLS = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}

# Steps of plain gradient descent that move ratios far beyond the bounds.
EIGHT = {"per_device_train_batch_size": 16, "max_steps": 8, "learning_rate": 0.2}
FOUR_MINIBATCHES = {**EIGHT, "steps_per_generation": 4}
REUSED = {**EIGHT, "num_iterations": 4, "epsilon": 0.05, "epsilon_high": 0.08}


@contextmanager
def in_order(shuffle: Callable[[dict], dict] = lambda batch: batch) -> Iterator[None]:
    """TRL spreads the completions of a generation over its optimizer steps at random; here they stay in order."""
    with patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", shuffle):
        with patch("trl.trainer.rloo_trainer.shuffle_sequence_dict", shuffle):
            yield


def in_our_order(trainer, batch: dict) -> dict:
    """Shuffle as with `shuffle_minibatches`."""
    args, number = trainer.args, len(batch["completion_ids"])
    number_of_generation = trainer._step // (args.steps_per_generation * trainer.num_iterations)
    seed = request_seed(f"{args.seed}/minibatches", number_of_generation)
    order = sum(split_into_minibatches(range(number), args.steps_per_generation, seed), [])
    with patch("torch.randperm", lambda n: torch.tensor(order)):
        return shuffle_sequence_dict(batch)


class _Head:
    """TRL's fused head without tiles, in the precision of its input."""

    @staticmethod
    def apply(hidden_states, weight, bias, labels, temperature, chunk_size, softcapping, scale, outputs):
        logps = (hidden_states @ weight.T / temperature).log_softmax(dim=-1)
        entropies = -(logps.exp() * logps).sum(dim=-1)
        return logps.gather(1, labels[:, None])[:, 0], entropies, None, None, None


def _norm(self, x):
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def _rotation(self, x, position_ids):
    frequencies = 1 / 10_000 ** (torch.arange(0, 16, 2, dtype=x.dtype) / 16)
    angles = position_ids[..., None].to(x.dtype) * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


@contextmanager
def in_double_precision() -> Iterator[None]:
    """Everything in float64; the model and TRL's head would compute some of it in float32."""
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch("trl.trainer.utils._ChunkedLogProbFunction", _Head),
            patch.object(qwen3.Qwen3RMSNorm, "forward", _norm),
            patch.object(qwen3.Qwen3RotaryEmbedding, "forward", _rotation),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def replayed(trainer, replay: Replay) -> None:
    """Let TRL's RLOO trainer, which takes no rollout function, replay completions."""

    def generate(self, prompts):
        output = replay(prompts, self)
        self.replayed_labels = output["label"]
        texts = TOKENIZER.batch_decode(output["completion_ids"], skip_special_tokens=True)
        return output["prompt_ids"], output["completion_ids"], [[{"role": "assistant", "content": t}] for t in texts]

    trainer._generate = MethodType(generate, trainer)


def run(
    directory: Path,
    trainers: dict,
    method: str,
    replay: Replay,
    *,
    dtype=None,
    lora=False,
    path=None,
    vllm=False,
    sharpness=1.0,
    shuffled=False,
    num_prompts=32,
    **settings,
):
    """Train, and return weights before and after, and the logged steps and evaluations."""
    trainer_class, config_class = trainers[method]
    dtype = dtype or torch.get_default_dtype()
    torch.manual_seed(shifted(0))
    model = tiny_model().to(dtype)
    model.lm_head.weight.data *= sharpness
    arguments = {
        "train_dataset": addition_dataset(num_prompts),
        "processing_class": TOKENIZER,
        "callbacks": [Recorder()],
    }
    if settings.get("eval_strategy"):
        arguments["eval_dataset"] = addition_dataset(4)
    if path is not None:  # of which the KL reference is loaded
        model = path
        settings["model_init_kwargs"] = {"dtype": dtype}
    if lora:
        arguments["peft_config"] = LORA
    is_trls_rloo = trainer_class is trl.RLOOTrainer
    if not is_trls_rloo:
        arguments["rollout_func"] = replay
    holder = {}

    def reward(completions, label=None, **kwargs):
        return holder["trainer"].replayed_labels if is_trls_rloo else stored_label(completions, label)

    if shuffled and trainers is OWN:
        settings["shuffle_minibatches"] = True
    args = config(directory, config_class, **settings)
    with in_order(lambda batch: in_our_order(trainer, batch)) if shuffled else in_order():
        trainer = holder["trainer"] = trainer_class(model, reward, args=args, **arguments)
        if is_trls_rloo:
            replayed(trainer, replay)
        if vllm:  # without an engine
            trainer.use_vllm, trainer._last_loaded_step = True, 0
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
            if trainers is OWN:
                trainer.update.token_weights = trainer.token_weights()
                trainer.update.objective = trainer.create_objective()
        before = trainable_weights(trainer.model)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    return before, trainable_weights(trainer.model), logs


def difference(ours: dict[str, torch.Tensor], trls: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of weights over the norm of their change."""

    def norm(one, other):
        return torch.stack([(one[n].double() - other[n].double()).norm() for n in trls]).norm()

    return (norm(ours, trls) / norm(trls, before)).item()
