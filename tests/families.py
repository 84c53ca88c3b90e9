"""The table of model families in docs/compatibility.md, from tiny models: `python tests/families.py` writes it."""

import re
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from support.architectures import build
from support.image_checkpoints import IMAGE_TOKENS, image_model, image_processor, image_tokenizer
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

from pacs_trl.rollouts.image_checkpoints import lora_of_language_model
from pacs_trl.rollouts.image_prompts import ImagePrompts
from pacs_trl.update.forward_pass import ForwardPass
from pacs_trl.update.packing import packs_images
from pacs_trl.update.prompt_images import PromptImages
from pacs_trl.update.startup_check import choose_forward_pass


PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
FAMILIES = yaml.safe_load((Path(__file__).parent / "data" / "families.yaml").read_text())
HEADER = f"| `model_type` | checkpoints | completions | prompts with images | LoRA | vLLM |\n|{' --- |' * 6}"
VLLM = {"own": "yes", "transformers": "through transformers"}


def row(family: dict[str, Any]) -> str:
    """The row of a family."""
    completions, images = pass_of_text(family), "no"
    if family.get("images"):
        images = pass_with_images(family)
    cells = f"`{family['model_type']}`", family["checkpoints"], completions, images, lora(family), VLLM[family["vllm"]]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join([HEADER, *map(row, FAMILIES)])


def documented() -> str:
    """The table of the page."""
    (documented_table,) = re.findall(rf"{re.escape(HEADER)}(?:\n\|.*)+", PAGE.read_text(encoding="utf-8"))
    return documented_table


def model_of(family: dict[str, Any]) -> torch.nn.Module:
    name = family["model_type"]
    return (
        image_model(name, image_tokenizer(name)) if family.get("images") else build(name, **family.get("config", {}))
    )


def chosen(model: torch.nn.Module, **how: Any) -> str:
    """The forward pass that the startup check chooses."""
    forward_pass = ForwardPass(model, torch.device("cpu"), reads_images="image_prompt" in how)
    choose_forward_pass(forward_pass, model, **how)
    return ("packed" if forward_pass.packing else "padded") + ("" if forward_pass.fused else ", own head")


def with_reason(outcome: str, reason: str | None) -> str:
    assert outcome.startswith("packed") or reason, f"families.yaml has no reason for {outcome!r}"
    return outcome if outcome.startswith("packed") else f"{outcome}: {reason}"


def pass_of_text(family: dict[str, Any]) -> str:
    model = model_of(family)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return with_reason(chosen(model), family.get("because"))


def pass_with_images(family: dict[str, Any]) -> str:
    """The forward pass of prompts with images; it was not run for families whose processor needs torchvision."""
    model, name = model_of(family), family["model_type"]
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if name in ("gemma4", "llama4"):
        outcome = pass_of_text(family).split(":")[0] if packs_images(model.config) else "padded"
    else:
        outcome = chosen(model, image_prompt=image_prompt(name))
    return with_reason(outcome, family.get("images_because") or family.get("because"))


def image_prompt(model_type: str) -> tuple[list[int], PromptImages | None]:
    """A prompt with an image as the processor of the family returns it."""
    if model_type == "mistral3":  # its processor needs torchvision
        token = image_tokenizer(model_type).convert_tokens_to_ids(IMAGE_TOKENS[model_type][0])
        inputs = {"pixel_values": torch.randn(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 56]])}
        return [5, token, token, 6], PromptImages(inputs, {})
    prompts = ImagePrompts()
    prompts.processing_class, prompts.chat_template, prompts.chat_template_kwargs = (
        image_processor(model_type),
        None,
        {},
    )
    return prompts._small_image_prompt()


def lora(family: dict[str, Any]) -> str:
    """Whether adapters of all linear layers leave the forward pass as it is, and what they do not reach."""
    model, cell = with_adapters(family, "all-linear"), "yes"
    if model is None:
        model, cell = with_adapters(family, family["lora"]), "not `all-linear`"
        assert model is not None
    if any("experts" in name and parameter.ndim == 3 for name, parameter in model.named_parameters()):
        cell += ", not experts"
    return cell


def with_adapters(family: dict[str, Any], targets: str | list[str]) -> torch.nn.Module | None:
    """A model with adapters, if their log-probs are computed as without; `None` if they fail."""
    model = model_of(family)
    config = LoraConfig(target_modules=targets, r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    if family.get("images"):
        config = lora_of_language_model(config, model, model.config)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    try:
        outcome = chosen(get_peft_model(model, config))
    except (AttributeError, ValueError):
        return None
    assert with_reason(outcome, family.get("because")) == pass_of_text(family)
    return model


if __name__ == "__main__":
    logging.set_verbosity_error()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(documented(), table()), encoding="utf-8")
