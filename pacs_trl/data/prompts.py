"""Prompts, built from problems or taken from the data, and their lengths."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ..errors import UserError
from .messages import content_as_text


# Instruction of the PACS paper (arXiv 2509.02522, appendix C.1).
PROMPT_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def build_prompt(
    problem: str, *, instruction: str = PROMPT_INSTRUCTION, system_prompt: str | None = None
) -> list[dict[str, str]]:
    """Build the messages of a problem: the stripped problem, a space, and the instruction (arXiv 2509.02522, appendix
    C.1), after the system turn if there is one. An empty instruction adds nothing."""
    content = f"{problem.strip()} {instruction}" if instruction else problem.strip()
    user = {"role": "user", "content": content}
    return [user] if system_prompt is None else [{"role": "system", "content": system_prompt}, user]


def prompt_of(problem: str | list, *, is_prompt: bool, instruction: str, system_prompt: str | None) -> str | list:
    """Return the prompt of a problem. Messages, and with `is_prompt` text, are prompts already; `system_prompt`
    replaces the system turn of messages. Raises a `ValueError` if `instruction` or `system_prompt` would be
    ignored."""
    if isinstance(problem, str) and not is_prompt:
        return build_prompt(problem, instruction=instruction, system_prompt=system_prompt)
    ignored = None
    if instruction not in ("", PROMPT_INSTRUCTION):
        ignored = f"prompt_instruction={instruction!r}"
    elif isinstance(problem, str) and system_prompt is not None:
        ignored = f"system_prompt={system_prompt!r}"
    if ignored is not None:
        raise UserError(
            f"{ignored} would be ignored, because the data contains whole prompts. Remove it, or name a column of "
            "problems with problem_column (problem_column: prompt, if text there is only a problem)."
        )
    if system_prompt is None or isinstance(problem, str):
        return problem
    other_turns = [turn for turn in problem if turn["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *other_turns]


def read_problem(cell: Any, column: str) -> str | list[dict[str, Any]] | None:
    """
    Return the text or messages in a cell, `None` if it is empty; raise a `ValueError` for anything else. Messages end
    with the last user turn, except in a column `prompt`. Content that is a list of text blocks becomes text.
    """
    if cell is None or isinstance(cell, str):
        return cell if cell and cell.strip() else None
    if not is_conversation(cell):
        raise UserError(f"`problem_column` {column!r} must contain text or messages, got {cell!r:.80}.")
    messages = [content_as_text(turn) for turn in cell]
    if column == "prompt":
        return messages or None
    while messages and messages[-1]["role"] != "user":  # the answer
        messages.pop()
    return messages or None


def is_conversation(cell: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a cell, or a prompt, is a list of messages."""
    return isinstance(cell, list) and all(isinstance(turn, Mapping) and turn.get("role") for turn in cell)


def prompt_lengths(
    prompts: Sequence[Any],
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Count the tokens of each prompt; either all prompts are messages, or all are text."""
    if len(prompts) == 0:
        return []
    if isinstance(prompts[0], str):
        return [len(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    arguments = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": False,
        **(chat_template_kwargs or {}),
    }
    if tools:
        arguments["tools"] = list(tools)
    return [len(ids) for ids in tokenizer.apply_chat_template(list(prompts), **arguments)]
