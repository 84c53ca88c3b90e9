"""Generative critic (GenAC, arXiv 2604.10701): segments of a completion, prompts, answers, and their loss.

A segment ends with a low-probability token, after a number of tokens, or with the completion. Positions count the
tokens that the policy generated, not tool results. A template of `critic_prompts` (figure 3) defines prompt and
answer: the text directly before and after `{score}` are the tags of an answer, `<answer>{score}</answer>`.

Shapes: `T` tokens of a completion, `N` answers of the critic (one per state), `M` tokens of answers.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.messages import content_as_text
from ..data.prompts import prompt_lengths
from ..errors import UserError
from ..evaluation.requests import SamplingSettings, tokenize_prompt
from ..evaluation.sampling import generate_tokens, stop_token_ids
from ..update.context_length import context_lengths


CRITIC_PROMPTS = Path(__file__).parent / "critic_prompts"
HIGHEST_SCORE = 10
PLACEHOLDERS = ("problem", "response", "tokens_used", "token_limit", "actor", "success_rate", "score")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
_SCORE_IN_TAGS = re.compile(r"(\S+)\{score\}(\S*[^\s.,;:])")  # a sentence may end after them


class State(NamedTuple):
    """
    A prefix of a completion, about which the critic is asked.

    Attributes:
        problem (`str`): The problem.
        response (`str`): The prefix as text.
        tokens_used (`int`): Number of tokens of the prefix.
        completion (`int`): Index of the completion in the generation batch of this process.
        begins_segment (`bool`): Whether a segment begins after the prefix, so that the answer is its value. Otherwise
            the state only trains the critic.
        outcome (`float`): Target of the answer, in [0, 1]; NaN if none is known.
    """

    problem: str
    response: str
    tokens_used: int
    completion: int = 0
    begins_segment: bool = True
    outcome: float = math.nan


class Answer(NamedTuple):
    """Token ids of a critic prompt and of its answer, and the log-prob of each token of the answer; NaN at temperature
    0, or if the engine returned none."""

    prompt: list[int]
    ids: list[int]
    logps: list[float]


class Actor(NamedTuple):
    """The policy: name and size, completion limit in tokens, and smoothed success rate (`None` at the start)."""

    name: str
    token_limit: int
    success_rate: float | None


def critic_prompt_path(name: str) -> Path:
    """Return the file of a critic prompt: one of `critic_prompts` by name, or a `.txt` file by path."""
    return Path(name) if name.endswith(".txt") else CRITIC_PROMPTS / f"{name}.txt"


def template_error(name: str) -> str | None:
    """Return why a critic prompt, by name or path, cannot be read, or what it lacks; `None` if it is complete."""
    try:
        template = critic_prompt_path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return f"critic_prompt={name!r} cannot be read ({error}). Name a template or a .txt file in UTF-8."
    missing = [word for word in ("problem", "response") if f"{{{word}}}" not in template]
    if missing:
        return f"critic_prompt={name!r} lacks {{{missing[0]}}}. Add it where the critic is to read the {missing[0]}."
    if _SCORE_IN_TAGS.search(template) is None:
        return (
            f"critic_prompt={name!r} has no {{score}} directly between two tags, from which answers are read. Let it "
            "say how an answer ends, such as <answer>{score}</answer>."
        )
    return None


class CriticPrompt:
    """
    A critic prompt by name or path. Raises a `ValueError` if it lacks a placeholder that it needs.

    Attributes:
        prompt_template (`str`): The text, with `PLACEHOLDERS` in braces; other braces are text.
        tags (pair of `str`): The text before and after the integer of an answer.
    """

    def __init__(self, name: str):
        if error := template_error(name):
            raise UserError(error)
        self.prompt_template = critic_prompt_path(name).read_text(encoding="utf-8").strip()
        in_tags = _SCORE_IN_TAGS.search(self.prompt_template)
        assert in_tags is not None
        opening, closing = in_tags.groups()
        self.tags = (opening, closing)
        self._score_of_answer = re.compile(rf"{re.escape(opening)}\s*([0-9]{{1,2}})\s*{re.escape(closing)}")

    def render(self, state: State, actor: Actor) -> str:
        """Return the prompt of a state. Braces in problem and response are kept."""
        rate = "unknown" if actor.success_rate is None else f"{actor.success_rate:.0%}"
        words = {
            "problem": state.problem,
            "response": state.response,
            "tokens_used": str(state.tokens_used),
            "token_limit": str(actor.token_limit),
            "actor": actor.name,
            "success_rate": rate,
            "score": "integer",
        }
        return _PLACEHOLDER.sub(lambda match: words[match[1]], self.prompt_template)

    def parse(self, answer: str) -> float | None:
        """Return the value in [0, 1] from the last tags of an answer; `None` without an integer from 0 to 10."""
        scores = self._score_of_answer.findall(answer)
        if not scores:
            return None
        score = int(scores[-1])
        if score > HIGHEST_SCORE:
            return None
        return score / HIGHEST_SCORE


def answer_length(tokenizer, ids: Sequence[int], tag: str | None, stop_ids: set[int]) -> int:
    """Return the number of tokens of an answer: of `ids`, up to and with the first end token, or the token that
    completes `tag`."""
    end = len(ids)
    for position, token in enumerate(ids):
        if token in stop_ids:
            end = position + 1
            break
    if tag is None:
        return end

    def has_tag(length: int) -> bool:
        return tag in tokenizer.decode(ids[:length])

    # Bisection assumes that a text with the tag still has it when tokens are added. Tokenizers that clean texts up
    # remove spaces, of which the tag has none.
    shorter_lengths = range(1, end)
    index = bisect_left(shorter_lengths, True, key=has_tag)
    if index < len(shorter_lengths):
        return shorter_lengths[index]
    return end


def generate_answers(
    model,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    *,
    tag: str | None = None,
    batch_size: int,
    synced: bool = False,
) -> list[Answer]:
    """
    Generate one answer per prompt, in batches of prompts of similar length.

    Args:
        model, tokenizer: The critic and its tokenizer.
        prompts (sequence of lists of `int`), seeds (sequence of `int`): Token ids of each prompt, and the seed of its
            answer.
        settings ([`SamplingSettings`]): Of the answers.
        tag (`str`, *optional*): Text that ends an answer.
        batch_size (`int`): Answers per call of `generate`.
        synced (`bool`): Whether all processes make their forward passes together.

    Returns:
        `list[Answer]`: In the order of `prompts`.
    """
    stop_ids = stop_token_ids(model, tokenizer)
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        pad_token_id = tokenizer.eos_token_id
    options: dict[str, Any] = {"stop_ids": stop_ids, "synced_gpus": synced, "pad_token_id": pad_token_id}
    if tag is not None:
        options |= {"stop_strings": [tag], "tokenizer": tokenizer}
    answers: dict[int, Answer] = {}  # by the index of the prompt
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        batch_prompts = [prompts[i] for i in indices]
        batch_seeds = [seeds[i] for i in indices]
        generated, logps = generate_tokens(model, batch_prompts, batch_seeds, settings, **options)
        for row, i in enumerate(indices):
            length = answer_length(tokenizer, generated[row], tag, stop_ids)
            answer_logps = [math.nan] * length
            if logps is not None:
                answer_logps = logps[row][:length]
            answers[i] = Answer(list(prompts[i]), generated[row][:length], answer_logps)
    return [answers[i] for i in range(len(prompts))]


def question_ids(tokenizer, texts: Sequence[str], chat_template_kwargs: dict | None = None) -> list[list[int]]:
    """Return the token ids of prompts, as user turns if the tokenizer has a chat template."""
    is_chat = tokenizer.chat_template is not None
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in texts]
    return [tokenize_prompt(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]


def problem_text(prompt: str | list[dict]) -> str:
    """Return the user turns of a prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_as_text(turn)["content"] for turn in prompt if turn["role"] == "user")


def check_critic(
    policy: str | PreTrainedModel,
    path: str,
    args,
    tokenizer: PreTrainedTokenizerBase,
    prompt: CriticPrompt,
    prompts: Iterable[str | list[dict]],
) -> None:
    """
    Check a critic before it is loaded.

    Args:
        policy (`str` or [`~transformers.PreTrainedModel`]): Path or instance of the policy.
        path (`str`): Path of the critic.
        args ([`GenACConfig`]): Configuration of the run.
        tokenizer: That of the critic.
        prompt ([`CriticPrompt`]): Its template.
        prompts (iterable of `str` or `list[dict]`): Prompts of the training set.

    Raises:
        `ValueError`: if the critic's context is too short for the longest prompt and answer, or one engine would serve
            two architectures.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    limits = [context_lengths(config)["max_position_embeddings"]]
    if args.use_vllm:
        limits.append(args.vllm_max_model_length)
    context_length = min((limit for limit in limits if limit is not None), default=math.inf)
    problems = list({problem_text(policy_prompt) for policy_prompt in prompts})
    _, longest_problem = max(zip(prompt_lengths(problems, tokenizer), problems, strict=True), default=(0, ""))
    state = State(longest_problem, "", args.max_completion_length)
    actor = Actor(path, args.max_completion_length, 1.0)
    (question,) = question_ids(tokenizer, [prompt.render(state, actor)], args.chat_template_kwargs)
    num_tokens = len(question) + args.max_completion_length + args.critic_max_new_tokens
    if num_tokens > context_length:
        raise UserError(
            f"The critic {path} has a context of {context_length} tokens, but its longest prompt, "
            f"max_completion_length={args.max_completion_length}, and critic_max_new_tokens="
            f"{args.critic_max_new_tokens} need {num_tokens}. Lower the last two, or shorten the template."
        )
    if args.use_vllm:
        if isinstance(policy, str):
            policy_config = AutoConfig.from_pretrained(policy, trust_remote_code=args.trust_remote_code)
        else:
            policy_config = policy.config
        policy_text, critic_text = policy_config.get_text_config(), config.get_text_config()
        names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        if any(getattr(policy_text, name, None) != getattr(critic_text, name, None) for name in names):
            raise UserError(
                f"The critic {path} has another architecture than the policy, so one vLLM engine cannot serve both. "
                "Use a critic like the policy, or use_vllm: false."
            )


def segment_starts(
    probabilities: Sequence[float], *, threshold: float | None, length: int | None, max_segments: int
) -> list[int]:
    """
    Return the first token of each segment of a completion, increasing from 0; empty without tokens.

    Args:
        probabilities (sequence of `float`): Probability of each token under the policy.
        threshold (`float`, *optional*): Tokens with a lower probability end a segment.
        length (`int`, *optional*): Every `length`-th token ends a segment.
        max_segments (`int`): Of more segments, the ends with even distances (in their own numbers) are kept.
    """
    if not probabilities:
        return []
    ends = []
    for t, probability in enumerate(probabilities):
        is_improbable = threshold is not None and probability < threshold
        is_multiple = length is not None and (t + 1) % length == 0
        is_last = t == len(probabilities) - 1
        if is_improbable or is_multiple or is_last:
            ends.append(t)
    num_segments = min(max_segments, len(ends))
    kept_ends = [ends[(i + 1) * len(ends) // num_segments - 1] for i in range(num_segments)]
    return [0, *(end + 1 for end in kept_ends[:-1])]


def token_values(values: Sequence[float], starts: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Return the value of the segment of each token, float32 `(T,)`. `values` and `starts` are those of the segments,
    and `num_tokens` is `T`."""
    lengths = [end - start for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)]
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def border_lambdas(starts: Sequence[int], num_tokens: int, gae_lambda: float) -> torch.Tensor:
    """Return the lambda between each token and the next for [`~gae.generalized_advantages`], `(T,)`: `gae_lambda`
    between segments, and 1 inside, because a discount per token would erase the reward of long completions."""
    lambdas = torch.ones(num_tokens)
    lambdas[[start - 1 for start in starts[1:]]] = gae_lambda
    return lambdas


def critic_rewards(values: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """Return the reward of each answer, `1 - (R - v)^2` in [0, 1], from its value `v` and the outcome `R`, all `(N,)`;
    0 for a value that could not be parsed (NaN)."""
    return (1.0 - (outcomes - values).square()).nan_to_num(0.0)


def reinforce_weights(
    rewards: torch.Tensor,
    outcomes: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
) -> torch.Tensor:
    """Return the factor on the log-prob of each answer, `(N,)`: its reward minus the mean reward of the other
    answers about completions with the same outcome, correct (above 0.5) or wrong, 0 without any. `rewards` and
    `outcomes`, `(N,)`, are those of this process; `reduce` sums over processes."""
    is_correct = (outcomes > 0.5).long()  # also the column of a completion in tables with one for each outcome
    in_column = torch.nn.functional.one_hot(is_correct, 2).to(torch.float64)  # (N, 2)
    reward_sums, counts = reduce(torch.stack([rewards.double() @ in_column, in_column.sum(dim=0)]))
    num_others = counts[is_correct] - 1.0
    mean_of_others = (reward_sums[is_correct] - rewards) / num_others.clamp(min=1.0)
    mean_of_others = mean_of_others.masked_fill(num_others == 0, 0.0)
    return (rewards - mean_of_others).to(rewards.dtype)


def reinforce_losses(
    logps: torch.Tensor, sampling_logps: torch.Tensor, weights: torch.Tensor, cap: float
) -> torch.Tensor:
    """Return the loss of each token of an answer, `(M,)`: `-min(pi / pi_old, cap) * weight * log pi`, where the ratio
    has no gradient. All tensors have shape `(M,)`; NaN in `sampling_logps` (at generation) gives a ratio of 1."""
    ratios = (logps.detach() - sampling_logps).nan_to_num(0.0).exp().clamp(max=cap)
    return -ratios * weights * logps
