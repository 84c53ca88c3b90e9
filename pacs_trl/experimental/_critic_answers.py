"""Generation of a critic's answers with transformers, and checks before the critic is loaded."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.requests import SamplingSettings, tokenize_prompt
from ..evaluation.sampling import generate_tokens, stop_token_ids
from ._critic_prompt import Actor, CriticPrompt, State


def answer_length(tokenizer, ids: Sequence[int], tag: str | None, stop_ids: set[int]) -> int:
    """Return the number of tokens up to the end token or `tag`."""
    end = next((i for i, token in enumerate(ids, 1) if token in stop_ids), len(ids))
    if tag is None:
        return end
    return min(end, 1 + bisect_left(range(1, end), True, key=lambda i: tag in tokenizer.decode(ids[:i])))


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
) -> list[tuple[list[int], list[float]]]:
    """Generate one answer, which `tag` ends, per prompt (token ids), in batches of similar length. Returns token ids
    and their log-probs (NaN at temperature 0). `synced`: whether all processes make their forward passes together."""
    stop_ids = stop_token_ids(model, tokenizer)
    end = {} if tag is None else {"stop_strings": [tag], "tokenizer": tokenizer}
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    answers: list = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows, own_seeds = [prompts[i] for i in chosen], [seeds[i] for i in chosen]
        how = {"pad_token_id": pad_token_id, "stop_ids": stop_ids, "synced_gpus": synced, **end}
        generated, logps = generate_tokens(model, rows, own_seeds, settings, **how)
        for row, i in enumerate(chosen):
            length = answer_length(tokenizer, generated[row], tag, stop_ids)
            known = [float("nan")] * length if logps is None else logps[row][:length]
            answers[i] = generated[row][:length], known
    return answers


def question_ids(tokenizer, texts: Sequence[str], chat_template_kwargs: dict | None = None) -> list[list[int]]:
    """Return the token ids of prompts, as user turns if the tokenizer has a chat template."""
    is_chat = tokenizer.chat_template is not None
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in texts]
    return [tokenize_prompt(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]


def problem_of(prompt: str | list[dict]) -> str:
    """Return the user turns of a prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(turn["content"] for turn in prompt if turn["role"] == "user")


def check_critic(
    policy: str | PreTrainedModel,
    path: str,
    args,
    tokenizer: PreTrainedTokenizerBase,
    prompt: CriticPrompt,
    prompts: Iterable[str | list[dict]],
) -> None:
    """Raise a `ValueError` if the critic's context is too short for the longest prompt and answer, or one engine would
    serve two architectures."""
    trust = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(path, **trust)
    room = config.get_text_config().max_position_embeddings
    if args.use_vllm and args.vllm_max_model_length is not None:
        room = min(room, args.vllm_max_model_length)
    longest = max({problem_of(each) for each in prompts}, key=len, default="")
    state, actor = State(longest, "", args.max_completion_length), Actor(path, args.max_completion_length, 1.0)
    (question,) = question_ids(tokenizer, [prompt.render(state, actor)], args.chat_template_kwargs)
    needed = len(question) + args.max_completion_length + args.critic_max_new_tokens
    if needed > room:
        raise ValueError(
            f"The critic {path} has a context of {room} tokens, but its longest prompt, max_completion_length="
            f"{args.max_completion_length}, and critic_max_new_tokens={args.critic_max_new_tokens} need {needed}. "
            "Lower the last two, or shorten the template."
        )
    if args.use_vllm:
        own = AutoConfig.from_pretrained(policy, **trust) if isinstance(policy, str) else policy.config
        names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        if any(getattr(own, name, None) != getattr(config, name, None) for name in names):
            raise ValueError(
                f"The critic {path} has another architecture than the policy, so one vLLM engine cannot serve both. "
                "Use a critic like the policy, or use_vllm: false."
            )
