"""Answers of a generative critic, with transformers and from an engine, and what has to be right of a critic before
its weights are loaded."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from trl.generation.vllm_generation import VLLMGeneration

from ..evaluation.requests import SamplingSettings
from ..evaluation.sampling import generate_tokens, stop_token_ids
from ..rollouts.vllm_checks import check_port, check_server
from .critic_prompt import Actor, CriticPrompt, State
from .genac_config import GenACConfig


class AfterAnswer(StoppingCriteria):
    """
    Ends an answer behind the closing tag, and says where that is.

    Args:
        tokenizer: Of the critic.
        tag (`str`): The closing tag. The text in front of it may be spelled with any tokens.
        vocab_size (`int`): Of the critic.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tag: str, vocab_size: int):
        self.tokenizer, self.tag = tokenizer, tag
        # Only such tokens can complete the tag; the others are not decoded.
        self.completes = torch.zeros(max(vocab_size, len(tokenizer)), dtype=torch.bool)
        for token, text in enumerate(tokenizer.batch_decode([[i] for i in range(len(tokenizer))])):
            self.completes[token] = tag[-1] in text
        self.prompt_length = 0

    def _has_tag(self, ids: Sequence[int]) -> bool:
        return self.tag in self.tokenizer.decode(ids[-4 * len(self.tag) :])  # a character may take up to four tokens

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        done = self.completes[input_ids[:, -1].cpu()]
        for row in done.nonzero()[:, 0].tolist():
            done[row] = self._has_tag(input_ids[row, self.prompt_length :].tolist())
        return done.to(input_ids.device)

    def length(self, ids: Sequence[int], stop_ids: set[int]) -> int:
        """Tokens of an answer up to its end, which it has."""
        for i, token in enumerate(ids, 1):
            if token in stop_ids or (self.completes[token] and self._has_tag(ids[:i])):
                return i
        return len(ids)


def generate_answers(
    model,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    *,
    ending: AfterAnswer,
    batch_size: int,
    synced: bool = False,
) -> list[tuple[list[int], list[float]]]:
    """
    One answer for each prompt, tokens and their log-probabilities (NaN at temperature 0); prompts of about one length
    share a batch. `synced`: processes make their forward passes together.
    """
    stop_ids = stop_token_ids(model, tokenizer)
    answers: list = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        rows = [prompts[i] for i in places]
        ending.prompt_length = max(map(len, rows))
        drawn, logps = generate_tokens(
            model,
            rows,
            [seeds[i] for i in places],
            settings,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            stop_ids=stop_ids,
            stopping_criteria=[ending],
            synced_gpus=synced,
        )
        for row, place in enumerate(places):
            length = ending.length(drawn[row], stop_ids)
            known = [float("nan")] * length if logps is None else logps[row][:length]
            answers[place] = drawn[row][:length], known
    return answers


def engine_settings(args: GenACConfig, tag: str, temperature: float) -> dict[str, Any]:
    """How an engine of TRL draws answers, in its own words: they end with the closing tag."""
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": args.critic_max_new_tokens,
        "structured_outputs_regex": None,
        "generation_kwargs": {"stop": [tag], "include_stop_str_in_output": True},
    }


def own_server(args: GenACConfig, accelerator, critic: PreTrainedModel, tokenizer) -> VLLMGeneration:
    """TRL's end of a vLLM server of the critic's own."""
    return VLLMGeneration(
        accelerator.unwrap_model(critic),
        accelerator,
        tokenizer,
        mode="server",
        server_base_url=str(args.critic_vllm_server_base_url).rstrip("/"),
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port + 1,
    )


def critic_tokenizer(path: str, args: GenACConfig, given: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """That of the critic, which is the policy's (`given`, if there is one) unless the critic has a path of its own."""
    if given is not None and args.critic_model_name_or_path is None:
        return given
    return AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=args.trust_remote_code)


def question_ids(tokenizer, texts: Sequence[str], args: GenACConfig) -> list[list[int]]:
    """Tokens of questions, as turns of a user where the critic knows turns."""
    if tokenizer.chat_template is not None:
        how = {"tokenize": False, "add_generation_prompt": True, **(args.chat_template_kwargs or {})}
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], **how) for text in texts]
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def problem_of(prompt: str | list[dict]) -> str:
    """What the policy is asked, as text: the user's turns."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(turn["content"] for turn in prompt if turn["role"] == "user")


def check_critic(
    policy: str | PreTrainedModel,
    path: str,
    args: GenACConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt: CriticPrompt,
    prompts: Iterable[str | list[dict]],
) -> None:
    """
    Raises:
        `ValueError`: if the critic cannot write the tags, its context is too short for the longest question and
        answer, or vLLM
            would have to serve two models of different shapes, or the critic's own server does not answer as it
            should.
    """
    prompt.check_vocabulary(tokenizer, path)
    trust = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(path, **trust)
    _check_context(config, path, args, tokenizer, prompt, prompts)
    if args.critic_vllm_server_base_url is not None:
        _check_own_server(args, path)
    elif args.use_vllm:
        own = AutoConfig.from_pretrained(policy, **trust) if isinstance(policy, str) else policy.config
        differing = [
            f"{name} {getattr(own, name, None)} and {getattr(config, name, None)}"
            for name in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
            if getattr(own, name, None) != getattr(config, name, None)
        ]
        if differing:
            raise ValueError(
                f"Policy and critic differ ({'; '.join(differing)}), and one vLLM engine serves both in turn: it is "
                "sent the "
                "weights of each before it generates. Use a critic of the policy's architecture, a server of its own "
                "(critic_vllm_server_base_url), or use_vllm: false."
            )


def _check_own_server(args: GenACConfig, path: str) -> None:
    """As that of the policy is checked, with what is the critic's in the place of what is the policy's."""
    if args.process_index == 0:
        own = copy.copy(args)
        own.vllm_server_base_url = args.critic_vllm_server_base_url
        own.max_completion_length = args.max_completion_length + args.critic_max_new_tokens
        check_port(args.vllm_group_port + 1, "vllm_group_port + 1", "Set vllm_group_port to another one.")
        check_server(own, path, "critic_vllm_server_base_url")


def _check_context(config, path, args, tokenizer, prompt, prompts) -> None:
    room = config.get_text_config().max_position_embeddings
    name = "max_position_embeddings"
    if args.use_vllm and args.vllm_max_model_length is not None and args.vllm_max_model_length < room:
        room, name = args.vllm_max_model_length, "vllm_max_model_length"
    problems = list({problem_of(each) for each in prompts})
    longest = max(problems, key=len, default="")
    actor = Actor(path, args.max_completion_length, 1.0)
    (question,) = question_ids(tokenizer, [prompt.render(State(longest, "", args.max_completion_length), actor)], args)
    needed = len(question) + args.max_completion_length + args.critic_max_new_tokens
    if needed > room:
        raise ValueError(
            f"The critic {path} has room for {room} tokens ({name}), and the longest question and answer take "
            f"{needed}: "
            f"{len(question)} of template and problem, max_completion_length={args.max_completion_length} of the "
            "response and "
            f"critic_max_new_tokens={args.critic_max_new_tokens}. Lower the last two, shorten the template, or raise "
            f"{name}."
        )
