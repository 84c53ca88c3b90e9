"""Tools that a model may call before it answers: what TRL's tool calls need of functions and templates, said before a
model is loaded.

TRL runs the tools, in the trainer and without a limit of time, takes what they say out of the loss, and counts calls
and failures.
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
from trl import GRPOConfig
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)


def check_tools(tools: list[Callable] | None) -> None:
    """
    Raises:
        `ValueError`: if the model cannot be told of a tool, or two have one name.
    """
    names = [check_tool(tool) for tool in tools or []]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"tools: two functions are called {' and '.join(sorted(twice))}, and the model calls a tool by its name. "
            "Rename one of them."
        )


def check_tool(function: Callable) -> str:
    """
    The name of a tool.

    Raises:
        `ValueError`: if a function cannot be described to a model.
    """
    try:
        return get_json_schema(function)["function"]["name"]
    except (DocstringParsingException, TypeHintParsingException, AttributeError, NameError, TypeError) as error:
        raise ValueError(
            f"tools: {function!r:.100} cannot be described to the model ({error}). A tool is a function whose "
            "arguments have type hints, and a docstring with a line for each of them under `Args:`."
        ) from error


def check_tool_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """
    Give a tokenizer what reads its model's calls of tools, if it has nothing.

    Raises:
        `ValueError`: if the chat template of the model `name` cannot be used with tools.
    """
    try:
        if not supports_tool_calling(tokenizer):
            raise ValueError("It does not show calls of tools and what they say.")
        if all(getattr(tokenizer, name, None) is None for name in ("response_template", "response_schema")):
            add_response_schema(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(
            f"The chat template of {name!r} cannot be used with tools: {error} Take a model that was trained to call "
            "tools (Qwen2.5, Qwen3), or remove the key tools."
        ) from error


def shared_turns_error(args: GRPOConfig, num_processes: int | None, is_sharded: bool = False) -> str | None:
    """What is wrong where processes draw together, of which each asks for another turn only while its own completions
    call tools. `is_sharded` says that the model is spread over the processes."""
    alone = args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size == 1 if args.use_vllm else not is_sharded
    if alone or num_processes in (None, 1):
        return None
    return (
        f"tools with {num_processes} processes that draw together (a vLLM server, vllm_tensor_parallel_size above 1, "
        "or FSDP and ZeRO-3 "
        "without vLLM) would wait for ever: a process whose completions call no tool asks for no further turn. Set "
        "use_vllm: true, "
        "vllm_mode: colocate and vllm_tensor_parallel_size: 1, so that each process has an engine of its own."
    )


def turns(completions: Sequence[list[dict]]) -> list[float]:
    """How often the model spoke in each completion: once more than tools answered."""
    return [float(sum(message["role"] == "assistant" for message in completion)) for completion in completions]
