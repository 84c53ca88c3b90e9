"""A check of LoRA's settings against the architecture of a model, before any of its weights are loaded.

peft looks for the modules only after the model is there, and is content if one of several names is found.
"""

import difflib
import re

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def check_lora_targets(
    peft_config: LoraConfig,
    model: str | PreTrainedModel,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """
    Refuse LoRA targets that the model does not have.

    As in peft, a list holds names of modules (or their last parts), a single text is "all-linear" or a regular
    expression for the full name. TRL hands on a list of one name as text; such a text becomes a list again.

    Args:
        peft_config ([`~peft.LoraConfig`]):
            Its `target_modules` are checked; `None` means peft's default for the architecture.
        model (`str` or [`~transformers.PreTrainedModel`]), revision (`str`, *optional*), trust_remote_code (`bool`):
            The model, or its path or Hub id, of which only the configuration is read.

    Raises:
        `ValueError`: if a target matches no module; names it and the linear layers there are.
    """
    targets = peft_config.target_modules
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    if isinstance(targets, str) and targets.isidentifier():
        targets = peft_config.target_modules = [targets]
    if isinstance(model, str):
        model_name = model
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        try:
            with torch.device("meta"):  # shapes only
                architecture = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError:  # not a causal language model, which the trainers say themselves
            return
    else:
        model_name = model.name_or_path or "the model"
        architecture = model
    names = [name for name, _ in architecture.named_modules()]
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(
                f"LoRA's target {targets!r} is read as a regular expression for full names of modules and is none "
                f"({error}). Give names as a list, an expression, or all-linear."
            ) from None
        missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        missing = sorted(t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names))
    if not missing:
        return
    linear = sorted(
        {name.split(".")[-1] for name, module in architecture.named_modules() if isinstance(module, nn.Linear)}
    )
    nearest = difflib.get_close_matches(missing[0], linear, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise ValueError(
        f"LoRA is to be put on {', '.join(missing)}, but {model_name} ({type(architecture).__name__}) has no such "
        f"module.{hint} "
        f"Its linear layers are {', '.join(linear)}. Set target_modules (in a recipe lora_target_modules) to some of "
        "these, or to all-linear."
    )
