"""Checks of what the rollout worker of `rollout_schedule: continuous` needs, a process of its own: reward functions,
tools, environments, prompts, and packages."""

import inspect
import pickle
import sys
from importlib.util import find_spec
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema
from trl.data_utils import is_conversational

from ..data.columns import columns_of
from ..errors import UserError
from .model_config import name_of
from .rollout_config import RolloutConfig


def check_user_code(args: RolloutConfig, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return reward functions, tools, and environments of a run as the user has passed them. Raises a [`UserError`]
    if the rollout worker, a process of its own, cannot use them, or if the dataset is not one that it can read."""
    functions = arguments["reward_funcs"]
    functions = list(functions) if isinstance(functions, list | tuple) else [functions] * (functions is not None)
    tools, environments = list(arguments["tools"] or ()), arguments["environment_factory"]
    what = "rollout_schedule: continuous"
    for function in functions:
        name = getattr(function, "__name__", repr(function)[:50])
        if isinstance(function, str | nn.Module):
            raise UserError(
                f"{what} calls reward functions in another process, which has no reward model such as {name!r:.50}. "
                "Pass a function, or remove the key."
            )
        needs = sorted({"compute_logps", "environments"} & inspect.signature(function).parameters.keys())
        if needs:
            raise UserError(
                f"{what} calls reward functions in another process, which has no `{needs[0]}` for {name!r}. Remove "
                "the parameter, or the key."
            )
    factories = list(environments.values()) if isinstance(environments, dict) else [environments]
    for kind, entries in (("reward function", functions), ("tool", tools), ("environment", factories)):
        for entry in entries:
            _check_sendable(entry, kind)
    dataset = arguments["train_dataset"]
    if arguments["rollout_func"] is not None or not isinstance(dataset, Dataset | None):
        refused = "rollout_func" if arguments["rollout_func"] is not None else "a streaming dataset"
        raise UserError(f"{what} does not support {refused}. Remove it, or use rollout_schedule: batch.")
    if dataset is not None and "prompt" in (columns_of(dataset) or ()) and not is_conversational(dataset[0]):
        raise UserError(
            f"{what} needs prompts that are lists of messages, and row 0 of train_dataset has text. Make it "
            '[{"role": "user", "content": TEXT}], or remove the key.'
        )
    if find_spec("aiohttp") is None:
        raise UserError(f"{what} needs aiohttp, which is not installed. Run `pip install aiohttp`.")
    if tools or environments is not None:
        _check_reads_calls(model, args, arguments["processing_class"])
    return {"reward_funcs": functions, "tools": tools, "environment_factory": environments}


def _check_sendable(entry: Any, kind: str) -> None:
    name = getattr(entry, "__name__", repr(entry)[:50])
    try:
        pickled = pickle.dumps(entry)
    except Exception as error:  # of any library
        raise UserError(
            f"rollout_schedule: continuous sends the {kind} {name!r} to another process, which fails "
            f"({type(error).__name__}: {str(error)[:100]}). Define it at the top of a module, without a lambda or a "
            "closure."
        ) from error
    if b"__main__" in pickled and not hasattr(sys.modules["__main__"], "__file__"):
        raise UserError(
            f"rollout_schedule: continuous imports the {kind} {name!r} in another process, which cannot import it "
            "from a notebook or an interactive session. Define it in a module."
        )


def _check_reads_calls(model: Any, args: RolloutConfig, tokenizer: Any) -> None:
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(name_of(model), trust_remote_code=args.trust_remote_code)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
        return
    try:
        add_response_schema(tokenizer)
    except ValueError as error:
        raise UserError(
            "rollout_schedule: continuous cannot read the tool calls of this model: its tokenizer has no "
            "`response_template`, and TRL knows none for its chat template. Set `response_template` on the tokenizer, "
            "or remove tools."
        ) from error
