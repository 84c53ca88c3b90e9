"""A real vLLM engine generates completions of prompts with images, with the weights and the tokens of the trainer."""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from support.image_checkpoints import image_model, image_processor
from support.image_runs import OURS, build, rows
from support.runs import spy_on
from transformers import AutoProcessor

from pacs_trl.errors import FailedRun
from pacs_trl.rollouts import image_prompts
from pacs_trl.update.prompt_images import process_prompt


pytestmark = [
    pytest.mark.trains,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="processors of vLLM need torchvision"),
]

# Largest differences of log-probs in nats; vLLM computes the encoder of Idefics 3 with a coarser activation.
TOLERANCES = {"qwen2_5_vl": 1e-4, "idefics3": 1e-2}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "idefics3"])
def checkpoint(request, tmp_path_factory):
    """A model with heads of a width that vLLM has on a CPU, and its processor."""
    directory, model_type = tmp_path_factory.mktemp("images"), request.param
    processor = image_processor(model_type)
    heads = {"num_attention_heads": 1, "head_dim": 32}
    if model_type == "qwen2_5_vl":
        from transformers import Qwen2VLVideoProcessor

        heads["rope_parameters"] = ROPE
        Qwen2VLVideoProcessor(patch_size=7, merge_size=2).save_pretrained(directory)
    image_model(model_type, processor.tokenizer, **heads).save_pretrained(directory)
    processor.save_pretrained(directory)
    return model_type, str(directory)


@pytest.fixture(scope="module")
def engine(checkpoint):
    """One engine for all trainers of a checkpoint."""
    from vllm import LLM

    from benchmarks.shared_engine import keep_plain_products

    monkeypatch, started = pytest.MonkeyPatch(), []
    keep_plain_products(monkeypatch.setattr)

    def start(**kwargs):
        if not started:
            started.append(LLM(**kwargs, enforce_eager=True, dtype="float32"))
        return started[0]

    yield start
    monkeypatch.undo()


@pytest.fixture
def trainer_on(checkpoint, engine, monkeypatch, tmp_path):
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "LLM", partial(engine))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
    vllm |= {"vllm_gpu_memory_utilization": 0.3, "max_completion_length": 8}

    def trainer(**settings):
        model_type, path = checkpoint
        processor = AutoProcessor.from_pretrained(path) if os.path.isdir(path) else None
        more = {"more": {"processing_class": processor}} | {"model": path, "recorded": False, "output_dir": tmp_path}
        return build(OURS["GRPO"], model_type, **more, **(vllm | settings))

    return trainer


def test_engine_reads_what_the_trainer_reads_after_every_update(trainer_on):
    """With texts among prompts of one and two images, which all return after the tower has changed."""
    mixed = rows((0, 2, 1, 1))
    settings = {"learning_rate": 0.5, "max_steps": 6, "num_generations": 4, "generation_batch_size": 16}
    trainer = trainer_on(dataset=mixed, **settings, per_device_train_batch_size=16)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "vis" in name}
    differences = []

    def compare(result, prompts, **kwargs):
        _, completions, logps, _ = result
        with torch.no_grad():
            trainer_logps = trainer.forward_pass.compute_logps(
                trainer.model, prompts, completions, trainer._prompt_images
            ).logps
        for ids, engine_tokens, expected in zip(completions, logps, trainer_logps, strict=True):
            if trainer.model.config.image_token_id not in ids:  # which the trainer reads as padding
                differences.append((torch.tensor([token[0] for token in engine_tokens]) - expected).abs().max().item())

    spy_on(trainer.vllm_generation, "generate", compare)
    trainer.train()
    assert len(differences) > 48 and max(differences) < TOLERANCES[trainer.model.config.model_type], differences
    moved = {name: (p - before[name]).abs().max() for name, p in trainer.model.named_parameters() if name in before}
    assert max(moved.values()) > 1e-3


def test_other_tokens_of_the_engine_are_an_error(trainer_on, monkeypatch):
    trainer = trainer_on(max_steps=1)
    monkeypatch.setattr(image_prompts, "ids_without_expansion", lambda *args: process_prompt(*args)[0])
    with pytest.raises(FailedRun, match="vLLM reads a prompt with images as .* tokens, the trainer as"):
        trainer.train()
