"""Check that prompts leave room for completions."""

import math
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from ..data import check_chat_template_kwargs
from ..data.columns import is_in_memory
from ..data.images import dataset_prompt_lengths
from ..data.messages import MessageCheck
from ..errors import UserError
from ..update.context_length import context_lengths
from .model_config import config_of, name_of
from .rollout_config import RolloutConfig


def check_lengths(model: str | PreTrainedModel, args: RolloutConfig, arguments: dict[str, Any]) -> int | None:
    """Check that prompts leave room for completions; this may download the model's config and tokenizer. Return the
    tokens of the longest prompt and a completion of it, or `None` if they are not known."""
    if arguments["environment_factory"] is not None or arguments["rollout_func"] is not None:
        return None
    tokenizer = arguments["processing_class"]
    if tokenizer is None:
        kwargs = {"revision": (args.model_init_kwargs or {}).get("revision", "main")}
        tokenizer = AutoTokenizer.from_pretrained(name_of(model), trust_remote_code=args.trust_remote_code, **kwargs)
    evaluation = arguments["eval_dataset"]
    datasets = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    datasets = {"train_dataset": arguments["train_dataset"], **datasets}
    contexts = context_lengths(config_of(model, args))
    return check_prompt_lengths(datasets, args, tokenizer, arguments["tools"], contexts)


def check_prompt_lengths(
    datasets: dict[str, Any],
    args: RolloutConfig,
    tokenizer: Any,
    tools: list[Callable] | None,
    contexts: dict[str, int | None],
) -> int | None:
    """Return the tokens of the longest prompt and a completion of it, or `None` if not all prompts are known. Raise a
    `ValueError` if a prompt plus `max_completion_length` tokens exceeds the context length of the model
    ([`context_lengths`]), `max_tokens_per_micro_batch` (`train_dataset` only), or, with vLLM, `vllm_max_model_length`;
    or if the text of a message ([`MessageCheck`]) or a key of `chat_template_kwargs` would not reach the prompt.
    Streaming datasets and those with a transform are skipped."""
    uses_vllm = args.use_vllm or args.rollout_engine == "vllm"
    limits_of_generation = contexts | {"vllm_max_model_length": args.vllm_max_model_length if uses_vllm else None}
    limits_of_training = dict(limits_of_generation)
    if isinstance(args.max_tokens_per_micro_batch, int):
        limits_of_training["max_tokens_per_micro_batch"] = args.max_tokens_per_micro_batch
    completion = args.max_completion_length or 1
    messages = MessageCheck(tokenizer, args.chat_template_kwargs, tools)
    longest, all_are_known = 0, args.max_completion_length is not None
    for name, dataset in datasets.items():
        if not is_in_memory(dataset):
            all_are_known = all_are_known and dataset is None
            continue
        limits = limits_of_training if name == "train_dataset" else limits_of_generation
        room, limit = min(((n, key) for key, n in limits.items() if n), default=(math.inf, ""))
        prompts = dataset["prompt"][:]
        messages.check(name, prompts)
        if not all(isinstance(prompt, str) for prompt in prompts):  # which no template renders
            check_chat_template_kwargs(tokenizer, args.chat_template_kwargs)
        measured = dataset if limit else dataset.select(range(min(1, len(dataset))))  # one tests the tokenizer
        lengths = dataset_prompt_lengths(name, measured, tokenizer, args.chat_template_kwargs, tools)
        longest = max([longest, *lengths])
        all_are_known = all_are_known and len(lengths) == len(dataset)
        if overlong := [i for i, length in enumerate(lengths) if length + completion > room]:
            remedy = f"Raise it to {max(lengths) + completion}"
            if limit in contexts:
                limit = f"the context of the model, {limit}"
                remedy = f"Lower max_completion_length to {max(room - max(lengths), 0)}"
            if room > completion:
                remedy += (
                    f", or remove prompts of more than {room - completion} tokens (in a recipe: max_prompt_length)"
                )
            raise UserError(
                f"Row {overlong[0]} of {name} has a prompt of {lengths[overlong[0]]} tokens. With "
                f"max_completion_length={completion}, {len(overlong)} of {len(lengths)} prompts do not fit into "
                f"{limit}={room}. {remedy}."
            )
    return longest + completion if all_are_known else None
