"""Synthetic rollouts, and optimizer steps of real trainers on them, with random weights in published model shapes.

Nothing is downloaded or generated. Used by the benchmarks in this folder and by tests/gpu.
"""

import collections
import copy
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from trl import GRPOConfig

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl.plan.cost import KNOWN_MODELS, ModelShape
from pacs_trl.update import packed_attention


NUM_GENERATIONS = 8
PROMPT_TOKENS = (16, 48)

# Small enough to run in seconds, on a GPU and on two CPU cores.
SMALL_MODELS = {
    "small": ModelShape(8, 256, 768, 4, 2, 64, 512, tied=True, qk_norm=True),
    "tiny": ModelShape(2, 64, 128, 2, 1, 32, 512, tied=True, qk_norm=True),
}

# What architectures need beside their size, by `model_type`; types of layers repeat. Completions exceed windows.
ARCHITECTURES: dict[str, dict] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 128, "query_pre_attn_scalar": 64},  # one layer of six has full attention
    "mistral": {"sliding_window": 256},
    "gpt_oss": {"sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "qwen3_5_text": {
        **{f"linear_num_{kind}_heads": 4 for kind in ("key", "value")},
        **{f"linear_{kind}_head_dim": 64 for kind in ("key", "value")},
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_local_experts": 0,
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 768,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 64,
        "mamba_chunk_size": 32,  # the padded passes of PyTorch's function take gigabytes with 256
    },
    "minimax": {  # padded
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
        "router_aux_loss_coef": 0.0,  # otherwise the exact update counts the loads of experts in one more forward pass
    },
    "stablelm": {},  # padded
}


def shape_of(model: str) -> ModelShape:
    """Return the shape of a published Qwen model by its Hub name without the owner, or of a small one."""
    return SMALL_MODELS.get(model) or KNOWN_MODELS[f"Qwen/{model}"]


def config_of(shape: ModelShape, model_type: str = "qwen3", **more) -> PreTrainedConfig:
    """Return the configuration of a model of this shape, of a type of [`ARCHITECTURES`]."""
    sizes = dict(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=16384,
    )
    settings = sizes | ARCHITECTURES[model_type] | more
    if "layer_types" in settings:
        settings["layer_types"] = (settings["layer_types"] * shape.num_layers)[: shape.num_layers]
    return AutoConfig.for_model(model_type, **settings)


def build_model(
    shape: ModelShape, device: str, *, seed: int = 0, model_type: str = "qwen3", **more
) -> PreTrainedModel:
    """Build a float32 model with random weights on `device`; `more` goes to its configuration."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape, model_type, **more))


@dataclass
class Size:
    """The size of an optimizer step: `num_groups * 8` completions, whose mean length is 0.35 of the maximum."""

    shape: ModelShape
    completion_max: int
    rows_per_forward: int
    num_groups: int
    bf16: bool
    model_type: str = "qwen3"


def recorded_rollouts(
    size: Size,
    num_groups: int,
    seed: int = 0,
    num_generations: int = NUM_GENERATIONS,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
) -> list[dict]:
    """Create completions of random tokens with log-normal lengths, scaled so that mean / max is 0.35."""
    generator = random.Random(seed)
    lengths = completion_lengths(generator, num_groups * num_generations, size.completion_max)
    vocabulary = range(3, min(size.shape.vocabulary, 255))
    rows = []
    for i, length in enumerate(lengths):
        if i % num_generations == 0:
            prompt = generator.choices(vocabulary, k=generator.randint(*prompt_tokens))
        rows.append({"prompt_ids": prompt, "completion_ids": generator.choices(vocabulary, k=length)})
    return rows


def completion_lengths(generator: random.Random, number: int, longest: int, *, mean_share: float = 0.35) -> list[int]:
    """Return log-normal lengths, scaled so that mean / longest is `mean_share`."""
    raw = [generator.lognormvariate(0.0, 0.55) for _ in range(number)]
    scale = mean_share * longest / statistics.mean(raw)
    lengths = [min(longest, max(8, round(scale * x))) for x in raw]
    lengths[lengths.index(max(lengths))] = longest
    return lengths


def labels_of(num_groups: int, uniform_fraction: float, num_generations: int = NUM_GENERATIONS) -> list[float]:
    """Return labels: the first groups are uniform (all 0), the others are half 1 and half 0."""
    num_uniform = round(uniform_fraction * num_groups)
    mixed = [1.0, 0.0] * (num_generations // 2)
    return [0.0] * (num_generations * num_uniform) + mixed * (num_groups - num_uniform)


@contextmanager
def kernels_of(attention: str) -> Iterator[None]:
    """Inside the context, `sdpa` means torch's kernels, also for packed passes, which take FlashAttention 4 where it
    is installed."""
    torch_kernels = patch.object(packed_attention, "flash_attention_4", lambda: None)
    with torch_kernels if attention == "sdpa" else nullcontext():
        yield


class Runner:
    """A trainer that replays rollouts: `step()` runs one optimizer step and returns its seconds.

    `settings` go to the configuration of the trainer.
    """

    def __init__(
        self,
        trainer_class,
        size: Size,
        rollouts: list[dict],
        labels: list[float],
        device: str,
        *,
        output_dir: str | Path = "outputs/benchmark",
        attention: str = "sdpa",
        peft_config=None,
        **settings,
    ):
        model = build_model(size.shape, device, model_type=size.model_type, attn_implementation=attention)
        if peft_config is not None:
            model = model.bfloat16() if size.bf16 else model.float()
        config_class = getattr(trainer_class, "_config_class", GRPOConfig)  # TRL's class has none
        defaults: dict[str, Any] = dict(
            per_device_train_batch_size=size.rows_per_forward,
            num_generations=NUM_GENERATIONS,
            max_completion_length=size.completion_max,
            max_grad_norm=0.0,
            learning_rate=1e-6,
            bf16=size.bf16,
            use_cpu=device == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        settings = defaults | settings
        rows_per_slot = settings["per_device_train_batch_size"]
        self.updates_per_generation = settings.pop("updates_per_generation", 1)
        slots = len(rollouts) // rows_per_slot
        settings["gradient_accumulation_steps"] = slots // self.updates_per_generation
        settings["steps_per_generation"] = slots
        self.rollouts = rollouts
        self.label(labels)
        self.trainer = trainer_class(
            model=model,
            reward_funcs=lambda label, **kwargs: label,
            args=config_class(str(output_dir), **settings),
            train_dataset=Dataset.from_list([{"prompt": f"p{i}", "label": 0.0} for i in range(len(rollouts))]),
            processing_class=build_tokenizer(),
            peft_config=peft_config,
        )
        model = self.trainer.model
        self.trainer._generate = self._replay
        self.trainer.reward_func_names = ["label"]
        if self.trainer.args.gradient_checkpointing:  # what `auto` became
            model.gradient_checkpointing_enable()
        self.trainer.create_optimizer()
        self.model, self.optimizer = self.trainer.accelerator.prepare(model, self.trainer.optimizer)
        self.trainer.model_wrapped, self.trainer.optimizer = self.model, self.optimizer
        self.trainer.current_gradient_accumulation_steps = settings["gradient_accumulation_steps"]
        self.device = device

    def label(self, labels: list[float]) -> None:
        """Set the labels of the rollouts for the next steps."""
        self.batch = [{"prompt": "p", "label": label} for label in labels]

    def _replay(self, prompts):
        prompt_ids = [r["prompt_ids"] for r in self.rollouts]
        completion_ids = [r["completion_ids"] for r in self.rollouts]
        logprobs = [[-1.0] * len(ids) for ids in completion_ids]  # as vLLM reports them, to both trainers
        return prompt_ids, completion_ids, None, ["c"] * len(prompts), logprobs, {}, None, []

    def step(self) -> float:
        """Return the seconds per optimizer step, averaged over the updates of one generation."""
        self._synchronize()
        started = time.perf_counter()
        for _ in range(self.updates_per_generation):
            slots = self.trainer.current_gradient_accumulation_steps
            for slot in range(slots):
                self.trainer.accelerator.gradient_state._set_sync_gradients(slot == slots - 1)
                self.trainer.training_step(self.model, copy.copy(self.batch), None)
            self.optimizer.step()
            self.model.zero_grad()
        self._synchronize()
        return (time.perf_counter() - started) / self.updates_per_generation

    def _synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_memory(self) -> int:
        """Return the peak memory of a step in bytes: allocated on a GPU, or saved for backward on a CPU."""
        if self.device == "cuda":
            self.step()  # allocates the moments of the optimizer, after the backward pass
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        kept = KeptTensors()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda handle: handle.tensor):
            self.step()
        return kept.peak


class KeptTensors:
    """Count the bytes that autograd keeps for backward passes; a shared storage counts once."""

    def __init__(self):
        self.users: collections.Counter[int] = collections.Counter()
        self.total = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> "KeptTensor":
        return KeptTensor(self, tensor)


class KeptTensor:
    def __init__(self, kept: KeptTensors, tensor: torch.Tensor):
        self.kept, self.tensor = kept, tensor
        storage = tensor.untyped_storage()
        self.address, self.num_bytes = storage.data_ptr(), storage.nbytes()
        kept.users[self.address] += 1
        if kept.users[self.address] == 1:
            kept.total += self.num_bytes
            kept.peak = max(kept.peak, kept.total)

    def __del__(self):
        self.kept.users[self.address] -= 1
        if self.kept.users[self.address] == 0:
            self.kept.total -= self.num_bytes


def matmul_rate(device: str, n: int, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product of size `n`, the best of five runs."""
    a, seconds = torch.randn(n, n, device=device, dtype=dtype), []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(4):
            a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 4 * 2 * n**3 / min(seconds)
