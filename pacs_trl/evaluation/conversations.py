"""Completions of several turns, in which the model calls tools or methods of an environment, as in training."""

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trl import GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.trainer.utils import get_callable_name

from ..data.environments import environment_tools
from ..data.prompts import is_conversation
from ..data.text_tokenizer import load_text_tokenizer
from ..data.tool_calls import readable_calls
from ..errors import UserError
from ..rewards import run_python, shared_code_verifier, tool_function
from ..rollouts.group_starts import GroupStarts, check_observation
from ..rollouts.reward_functions import independent_copy, with_truncated
from ..rollouts.user_code import stoppable_tools
from ..update.rollout import as_numbers
from ..verification import completion_text
from .arguments import EvaluationArguments
from .benchmarks import LoadedBenchmark
from .requests import Completion, Request, SamplingSettings, sample_seed


logger = logging.getLogger(__name__)


def load_tools(args: EvaluationArguments) -> tuple[Any, list[Callable]]:
    """Load the tokenizer, with the template that parses calls, and the tools. Raises a `ValueError` if a tool cannot
    be imported, or the chat template has no tools."""
    tokenizer = load_text_tokenizer(args.model, **args.loading)
    tools = [tool_function(name) for name in args.tools or []]
    if not supports_tool_calling(tokenizer):
        raise UserError(f"The chat template of {args.model} renders no calls of tools. Evaluate another model.")
    if run_python in tools:
        shared_code_verifier().start()
    parses_calls = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)
    if not parses_calls:
        tokenizer = add_response_schema(tokenizer)
    return tokenizer, tools


@dataclass
class _Conversation:
    """
    A prompt and its completion so far.

    Attributes:
        request ([`Request`]): The sample that is generated.
        prompt (`list[dict]`): Messages, with the first observation of the environment.
        row (`dict`): Dataset row of the problem; empty without an environment.
        environment, tools: The environment (or `None`), and what the model may call.
        prompt_ids (`list[int]`): Tokens of the prompt.
        ids (`list[int]`), messages (`list[dict]`): Tokens and messages of the completion, with the results of tools.
        num_tokens (`int`): Tokens that the model generated, without the results of tools.
        is_truncated (`bool`): Whether the last turn, or a result of a tool, was cut off.
    """

    request: Request
    prompt: list[dict]
    row: dict[str, Any]
    environment: Any
    tools: list[Callable]
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)
    num_tokens: int = 0
    is_truncated: bool = False


class ConversationEngine:
    """
    Engine that generates the turns of `batch_size` conversations at a time with another engine.

    The rules are those of TRL's trainer: `max_new_tokens` covers all turns and results of tools, a result that does
    not fit ends the completion, and an exception of a tool is its result. Records have the whole `conversation`, and
    in an environment the `reward`, which is the sum of its reward functions.
    """

    _is_vlm = False
    # Results of tools and the start of the next turn, as in training. TRL's method reads attributes of this class.
    _suffix_ids: Any = GRPOTrainer._get_tool_suffix_ids

    def __init__(
        self, engine: Any, tokenizer: Any, tools: list[Callable], args: EvaluationArguments, benchmark: LoadedBenchmark
    ):
        self.engine = engine
        self.tools = tools
        self.batch_size = args.batch_size
        self.max_rounds = math.inf
        if args.max_tool_calling_iterations is not None:
            self.max_rounds = args.max_tool_calling_iterations
        self.row_of_problem = {problem.id: problem.row or {} for problem in benchmark.problems}
        self.number_of_problem = {problem.id: i for i, problem in enumerate(benchmark.problems)}

        # Environments. Several kinds have names, which the column `environment` of a row refers to; one has the name
        # `None`. Without an environment its factory is `None`.
        factories, self.reward_funcs = benchmark.environment or (None, [])
        if not isinstance(factories, dict):
            factories = {None: factories}
        self.starts = GroupStarts()
        self.factories: dict[str | None, Callable | None] = {}
        for name, factory in factories.items():
            self.factories[name] = self.starts.wrap(factory) if factory else factory
        # Environments that exist, by kind: each batch resets them instead of creating others.
        self.environments: dict[str | None, list] = {name: [] for name in self.factories}
        self.has_warned_of_differing_starts = False
        self.has_warned_of_unknown_starts = False

        # TRL's method reads `processing_class`, and `_tokenizer`.
        self.processing_class = self._tokenizer = tokenizer
        is_stable = is_chat_template_prefix_preserving(tokenizer)
        self.chat_template = None if is_stable else get_training_chat_template(tokenizer)
        self.chat_template_kwargs = args.chat_template_kwargs or {}

    def generate(self, requests: Sequence[Request], settings: SamplingSettings):
        """Yield each request with its completion, in order, a batch at a time."""
        for start in range(0, len(requests), self.batch_size):
            batch = self._open(requests[start : start + self.batch_size])
            self._converse(batch, settings)
            rewards = self._rewards(batch)
            for conversation, reward in zip(batch, rewards, strict=True):
                messages = [*conversation.prompt, *conversation.messages]
                more = {"conversation": json.loads(json.dumps(messages, default=str))}
                if conversation.environment is not None:
                    more["reward"] = reward
                completion = Completion(
                    text=completion_text(conversation.messages) or "",
                    num_tokens=conversation.num_tokens,
                    finish_reason="length" if conversation.is_truncated else "stop",
                    token_ids=conversation.ids,
                    more=more,
                )
                yield conversation.request, completion

    def _open(self, requests: Sequence[Request]) -> list[_Conversation]:
        """Return the conversations of these requests, in environments that are reset."""
        problem_numbers = [self.number_of_problem[request.problem_id] for request in requests]
        self.starts.begin(problem_numbers, problem_numbers)
        num_used = dict.fromkeys(self.factories, 0)  # environments of each kind
        batch = []
        for request in requests:
            assert is_conversation(request.prompt)  # checked by `evaluate`
            prompt = request.prompt
            row = self.row_of_problem[request.problem_id]
            environment = None
            has_named_kinds = None not in self.factories
            kind = row.get("environment") if has_named_kinds else None
            factory = self.factories[kind]
            if factory is not None:
                if num_used[kind] == len(self.environments[kind]):
                    self.environments[kind].append(factory())
                environment = self.environments[kind][num_used[kind]]
                num_used[kind] += 1
                arguments = dict(row)
                if kind is not None:
                    del arguments["environment"]
                observation = environment.reset(**arguments)
                if observation is not None:  # text, of content blocks too
                    check_observation(observation, type(environment).__name__, takes_images=False)
                    last_message = prompt[-1] | {"content": prompt[-1]["content"] + observation}
                    prompt = [*prompt[:-1], last_message]
            tools = list(self.tools)
            if environment is not None:
                tools += environment_tools(environment)
            prompt_ids = self._tokenizer.apply_chat_template(
                prompt,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                return_dict=False,
                tools=tools or None,
                **self.chat_template_kwargs,
            )
            batch.append(_Conversation(request, prompt, row, environment, tools, prompt_ids))
        self._warn_of_starts()
        return batch

    def _warn_of_starts(self) -> None:
        """Warn once if completions of a problem start from different states of the environment, and once if that is
        not known."""
        if self.starts.differing and not self.has_warned_of_differing_starts:
            self.has_warned_of_differing_starts = True
            number, reason = next(iter(self.starts.differing.items()))
            logger.warning(
                f"The completions of problem {number} start from different states, as `reset` of the environment does "
                f"not return to one: {reason}. pass@k then counts different problems as one; let `reset` choose the "
                "example by a column of the dataset or by `seed`."
            )
        unknown = sorted(self.starts.unknown - self.starts.differing.keys())
        if unknown and not self.has_warned_of_unknown_starts:
            self.has_warned_of_unknown_starts = True
            logger.warning(
                f"It is not known whether the completions of problem {unknown[0]} start from one state: the "
                "environment may keep a part of its state outside of this process, and `reset` got no seed. If "
                "`reset` chooses at random, give it the seed of the problem: `def reset(self, seed, **kwargs)`."
            )

    def _converse(self, batch: list[_Conversation], settings: SamplingSettings) -> None:
        """Generate turns, and answer their calls of tools, until no conversation of the batch has another turn."""
        limit = settings.max_new_tokens
        turn = 0
        unfinished = batch
        while unfinished:
            requests = []
            for i, conversation in enumerate(unfinished):
                seed = conversation.request.seed
                if turn > 0:
                    seed = sample_seed(seed, "turn", turn)
                requests.append(Request(str(i), turn, seed, conversation.prompt_ids + conversation.ids))
            # One limit for all: what a conversation generates beyond its own is cut off.
            longest = max(limit - len(conversation.ids) for conversation in unfinished)
            for request, completion in self.engine.generate(requests, replace(settings, max_new_tokens=longest)):
                self._add_turn(unfinished[int(request.problem_id)], completion, limit)
            turn += 1
            if turn > self.max_rounds:
                return
            unfinished = [conversation for conversation in unfinished if self._answer_calls(conversation, limit)]

    def _add_turn(self, conversation: _Conversation, completion: Completion, limit: int) -> None:
        """Add the generated turn to a conversation, whose completion has at most `limit` tokens."""
        turn_ids = list(completion.token_ids[: limit - len(conversation.ids)])
        prefix = conversation.prompt_ids + conversation.ids
        with readable_calls(self._tokenizer):
            message = parse_response(self._tokenizer, turn_ids, prefix=prefix, tools=[*conversation.tools])
        conversation.messages.append(message)
        conversation.ids = conversation.ids + turn_ids
        conversation.num_tokens += len(turn_ids)
        is_cut_off = len(turn_ids) < len(completion.token_ids)
        conversation.is_truncated = completion.finish_reason == "length" or is_cut_off

    def _answer_calls(self, conversation: _Conversation, limit: int) -> bool:
        """Call the tools that the last turn asks for, and return whether there is another turn. Results that do not
        fit into `limit` tokens, or into the model's context, are dropped."""
        calls = conversation.messages[-1].get("tool_calls") or []
        if not calls:
            return False
        results = [_result(conversation.tools, call) for call in calls]
        result_ids = self._suffix_ids(results)
        length = len(conversation.ids) + len(result_ids)
        fits_into_context = len(conversation.prompt_ids) + length < self.engine.context_length
        if length > limit or not fits_into_context:
            return False
        conversation.messages = conversation.messages + results
        conversation.ids = conversation.ids + result_ids
        conversation.is_truncated = length == limit
        return length < limit

    def _rewards(self, batch: list[_Conversation]) -> list[float | None]:
        """Return the sum of the rewards of each conversation, of reward functions and of its environment; `None` if
        all of them are `None`."""
        arguments: dict[str, Any] = {}  # as TRL passes them
        for name in batch[0].row.keys() - {"prompt", "completion", "completion_ids"}:
            arguments[name] = [conversation.row[name] for conversation in batch]
        arguments |= {
            "prompts": [conversation.prompt for conversation in batch],
            "completions": [conversation.messages for conversation in batch],
            "completion_ids": [conversation.ids for conversation in batch],
            "environments": [conversation.environment for conversation in batch],
            "trainer_state": None,
            "log_extra": lambda *_: None,
            "log_metric": lambda *_: None,
        }
        is_truncated = [conversation.is_truncated for conversation in batch]
        rewards_by_source = []
        for function in self.reward_funcs:
            arguments_of_function = independent_copy(with_truncated(function, arguments, is_truncated))
            result = _run_if_coroutine(function(**arguments_of_function))
            rewards_by_source.append(as_numbers(result, get_callable_name(function), len(batch)))
        rewards_by_source.append([_reward_of_environment(conversation.environment) for conversation in batch])
        totals: list[float | None] = []
        for rewards in zip(*rewards_by_source, strict=True):
            known = [reward for reward in rewards if reward is not None]
            totals.append(sum(known) if known else None)
        return totals


def _reward_of_environment(environment: Any) -> float | None:
    """Return the reward that an environment computes; `None` if it computes none."""
    if not hasattr(environment, "get_reward"):
        return None
    return _run_if_coroutine(environment.get_reward())


def _result(tools: list[Callable], call: dict) -> dict[str, Any]:
    """Return the message with the result of a call; the error, if the tool raises one."""
    function = call.get("function", {})
    name = function.get("name", "unknown")
    tool_by_name = stoppable_tools({tool.__name__: tool for tool in tools})
    try:
        if name not in tool_by_name:
            raise UserError(f"Tool {name} not found.")
        content = _run_if_coroutine(tool_by_name[name](**function["arguments"]))
    except Exception as error:  # what the model is told in training
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


def _run_if_coroutine(result: Any) -> Any:
    """Return the result of a function of the user, which may be asynchronous."""
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result
