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
    is_ready = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)
    return tokenizer if is_ready else add_response_schema(tokenizer), tools


@dataclass
class _Conversation:
    """A prompt and its completion: `messages` and `ids` contain the results of tools, `num_tokens` does not."""

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
        self.engine, self.tools, self.batch_size = engine, tools, args.batch_size
        self.rows = {problem.id: problem.row for problem in benchmark.problems}
        factories, self.reward_funcs = benchmark.environment or (None, [])
        factories = factories if isinstance(factories, dict) else {None: factories}
        self.starts = GroupStarts()
        self.factories = {name: each and self.starts.wrap(each) for name, each in factories.items()}
        self.number_of = {problem.id: i for i, problem in enumerate(benchmark.problems)}
        self.has_warned = self.has_warned_of_unknown = False
        self.pools: dict[str | None, list] = {name: [] for name in self.factories}
        self.max_rounds = math.inf if args.max_tool_calling_iterations is None else args.max_tool_calling_iterations
        self.processing_class = self._tokenizer = tokenizer
        is_stable = is_chat_template_prefix_preserving(tokenizer)
        self.chat_template = None if is_stable else get_training_chat_template(tokenizer)
        self.chat_template_kwargs = args.chat_template_kwargs or {}

    def generate(self, requests: Sequence[Request], settings: SamplingSettings):
        for start in range(0, len(requests), self.batch_size):
            batch = self._open(requests[start : start + self.batch_size])
            self._converse(batch, settings)
            rewards = self._rewards(batch)
            for each, reward in zip(batch, rewards, strict=True):
                conversation = json.loads(json.dumps([*each.prompt, *each.messages], default=str))
                more = {"conversation": conversation} | ({"reward": reward} if each.environment is not None else {})
                text, reason = completion_text(each.messages) or "", "length" if each.is_truncated else "stop"
                yield each.request, Completion(text, each.num_tokens, reason, each.ids, more)

    def _open(self, requests: Sequence[Request]) -> list[_Conversation]:
        """Return the conversations of these requests, in environments that are reset."""
        used, batch = dict.fromkeys(self.factories, 0), []
        numbers = [self.number_of[request.problem_id] for request in requests]
        self.starts.begin(numbers, numbers)
        for request in requests:
            assert is_conversation(request.prompt)  # checked by `evaluate`
            row, prompt, environment = self.rows[request.problem_id] or {}, request.prompt, None
            kind = row.get("environment") if None not in self.factories else None
            if (factory := self.factories[kind]) is not None:
                if used[kind] == len(self.pools[kind]):
                    self.pools[kind].append(factory())
                environment = self.pools[kind][used[kind]]
                used[kind] += 1
                observation = environment.reset(**{k: v for k, v in row.items() if kind is None or k != "environment"})
                if observation is not None:  # text, of content blocks too
                    check_observation(observation, type(environment).__name__, takes_images=False)
                    prompt = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + observation}]
            tools = [*self.tools, *(environment_tools(environment) if environment is not None else [])]
            prompt_ids = self._tokenizer.apply_chat_template(
                prompt,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                return_dict=False,
                tools=tools or None,
                **self.chat_template_kwargs,
            )
            batch.append(_Conversation(request, prompt, row, environment, tools, prompt_ids))
        if self.starts.differing and not self.has_warned:
            self.has_warned = True
            number, reason = next(iter(self.starts.differing.items()))
            logger.warning(
                f"The completions of problem {number} start from different states, as `reset` of the environment does "
                f"not return to one: {reason}. pass@k then counts different problems as one; let `reset` choose the "
                "example by a column of the dataset or by `seed`."
            )
        if (unknown := sorted(self.starts.unknown - self.starts.differing.keys())) and not self.has_warned_of_unknown:
            self.has_warned_of_unknown = True
            logger.warning(
                f"It is not known whether the completions of problem {unknown[0]} start from one state: the "
                "environment may keep a part of its state outside of this process, and `reset` got no seed. If "
                "`reset` chooses at random, give it the seed of the problem: `def reset(self, seed, **kwargs)`."
            )
        return batch

    def _converse(self, batch: list[_Conversation], settings: SamplingSettings) -> None:
        limit, turn = settings.max_new_tokens, 0
        while batch:
            requests = []
            for i, each in enumerate(batch):
                seed = sample_seed(each.request.seed, "turn", turn) if turn else each.request.seed
                requests.append(Request(str(i), turn, seed, each.prompt_ids + each.ids))
            now = replace(settings, max_new_tokens=max(limit - len(each.ids) for each in batch))
            for request, completion in self.engine.generate(requests, now):
                each = batch[int(request.problem_id)]
                ids = list(completion.token_ids[: limit - len(each.ids)])
                prefix = each.prompt_ids + each.ids
                with readable_calls(self._tokenizer):
                    each.messages.append(parse_response(self._tokenizer, ids, prefix=prefix, tools=[*each.tools]))
                each.ids, each.num_tokens = each.ids + ids, each.num_tokens + len(ids)
                each.is_truncated = completion.finish_reason == "length" or len(ids) < len(completion.token_ids)
            turn += 1
            batch = [each for each in batch if turn <= self.max_rounds and self._answer_calls(each, limit)]

    def _answer_calls(self, each: _Conversation, limit: int) -> bool:
        """Call the tools that the last turn asks for, and return whether there is another turn."""
        results = [_result(each.tools, call) for call in each.messages[-1].get("tool_calls") or []]
        suffix = self._suffix_ids(results) if results else []
        length = len(each.ids) + len(suffix)
        if not results or length > limit or len(each.prompt_ids) + length >= self.engine.context_length:
            return False
        each.messages, each.ids = each.messages + results, each.ids + suffix
        each.is_truncated = length == limit
        return length < limit

    def _rewards(self, batch: list[_Conversation]) -> list[float | None]:
        names = batch[0].row.keys() - {"prompt", "completion", "completion_ids"}
        truncated = [each.is_truncated for each in batch]
        columns = {name: [each.row[name] for each in batch] for name in names} | {
            "prompts": [each.prompt for each in batch],
            "completions": [each.messages for each in batch],
            "completion_ids": [each.ids for each in batch],
            "environments": [each.environment for each in batch],
            "trainer_state": None,
            "log_extra": lambda *_: None,
            "log_metric": lambda *_: None,
        }
        rewards = []
        for function in self.reward_funcs:
            arguments = with_truncated(function, columns, truncated)
            result = _run_if_coroutine(function(**independent_copy(arguments)))
            rewards.append(as_numbers(result, get_callable_name(function), len(batch)))
        rewards.append([_reward_of_environment(each.environment) for each in batch])
        totals: list[float | None] = []
        for rewards_of_completion in zip(*rewards, strict=True):
            known = [reward for reward in rewards_of_completion if reward is not None]
            totals.append(sum(known) if known else None)
        return totals


def _reward_of_environment(environment: Any) -> float | None:
    """Return the reward that an environment computes; `None` if it computes none."""
    return _run_if_coroutine(environment.get_reward()) if hasattr(environment, "get_reward") else None


def _result(tools: list[Callable], call: dict) -> dict[str, Any]:
    """Return the message with the result of a call."""
    function = call.get("function", {})
    name = function.get("name", "unknown")
    by_name = stoppable_tools({tool.__name__: tool for tool in tools})
    try:
        if name not in by_name:
            raise UserError(f"Tool {name} not found.")
        content = _run_if_coroutine(by_name[name](**function["arguments"]))
    except Exception as error:  # what the model is told in training
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


def _run_if_coroutine(result: Any) -> Any:
    return asyncio.run(result) if inspect.iscoroutine(result) else result
