"""The in-process sampler, for CPUs and tests: transformers `generate` with one random stream per completion.

Random numbers never come from a global generator: each completion owns a stream of uniforms that depends on its seed
alone, and a token is the inverse of the cumulative distribution at the next uniform. A completion therefore does not
depend on which others share its batch, up to the rounding of the forward pass; with the same batches it is
bit-for-bit the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..update.score_rows import score_rows
from .requests import Completion, Prompt, SamplingSettings, render_prompt, sample_seed


def sample_completions(
    model,
    tokenizer,
    prompts: Sequence[Prompt],
    *,
    n: int,
    settings: SamplingSettings | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[Completion]]:
    """
    Sample `n` completions for each prompt from a causal language model that is already loaded.

    Args:
        model, tokenizer: Of transformers. The training mode is restored; no global random state is read or changed.
        prompts (sequence of conversations or strings): Strings are continued as they are.
        n (`int`): Completions per prompt.
        settings ([`SamplingSettings`], *optional*): How tokens are sampled.
        seed (`int`): Completion `j` of prompt `i` depends on `(seed, i, j)`.
        batch_size (`int`): Completions per call of `generate`.
    """
    rows = [(i, j) for i in range(len(prompts)) for j in range(n)]
    texts = [render_prompt(tokenizer, prompt) for prompt in prompts]
    completions: list[list[Completion]] = [[] for _ in prompts]
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        seeds = [sample_seed(seed, str(i), j) for i, j in batch]
        batch_texts = [texts[i] for i, _ in batch]
        found = generate_batch(model, tokenizer, batch_texts, seeds, settings or SamplingSettings())
        for (i, _), completion in zip(batch, found, strict=True):
            completions[i].append(completion)
    return completions


def generate_batch(
    model, tokenizer, texts: Sequence[str], seeds: Sequence[int], settings: SamplingSettings
) -> list[Completion]:
    """One completion per rendered prompt and seed, in one call of `generate`."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    stop_ids = stop_token_ids(model, tokenizer)
    generated, _ = generate_tokens(model, rows, seeds, settings, pad_token_id=pad_token_id, stop_ids=stop_ids)
    completions = []
    for tokens in generated:
        length = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
        text = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        completions.append(Completion(text, length or len(tokens), "stop" if length else "length"))
    return completions


def generate_tokens(
    model,
    rows: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    *,
    pad_token_id: int,
    stop_ids: set[int],
    **more,
) -> tuple[list[list[int]], list[list[float]] | None]:
    """
    One completion per list of prompt tokens and seed, in one call of `generate`, which gets `more`.

    Returns:
        Tokens (equally many per completion, also behind an end token) and the log-probs they were sampled with;
        `None` at temperature 0.
    """
    longest = max(len(row) for row in rows)
    input_ids = torch.tensor([[pad_token_id] * (longest - len(row)) + list(row) for row in rows])  # (B, prompt)
    attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    # Neutral values are spelled out: `generate` fills what is unset from the model's own generation config, and
    # shipped checkpoints carry a repetition penalty there.
    generation_config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_new_tokens=0,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=sorted(stop_ids),
        pad_token_id=pad_token_id,
    )
    sampler = SeededSampler(settings, seeds, prompt_length=longest) if settings.temperature > 0 else None
    with evaluation_mode(model), torch.no_grad():
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([sampler] if sampler else []),
            **more,
        )
    logps = None if sampler is None else torch.stack(sampler.logps, dim=1).tolist()
    return output[:, longest:].tolist(), logps


@contextmanager
def evaluation_mode(model) -> Iterator[None]:
    """`model.eval()` for the length of a block; every module gets its own mode back, also where modes are mixed."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class SeededSampler(LogitsProcessor):
    """
    Turns greedy search into sampling with one random stream per row.

    The scores of a row are warped (temperature, top-k, top-p), the token whose slice of the cumulative distribution
    holds the row's next uniform is chosen, and every other score becomes -inf, so that the arg max of `generate` takes
    it. `logps` keeps their log-probabilities.
    """

    def __init__(self, settings: SamplingSettings, seeds: Sequence[int], prompt_length: int):
        self.prompt_length = prompt_length
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.temperature))])
        if settings.top_k > 0:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))
        # Philox is counter based: token t of a row is uniform number t of its seed, whatever the batch.
        self.uniforms = torch.from_numpy(
            np.stack([np.random.Generator(np.random.Philox(s)).random(settings.max_new_tokens) for s in seeds])
        )  # (B, max_new_tokens) float64
        self.logps: list[torch.Tensor] = []  # of the chosen tokens, (B,) for each step

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        step = input_ids.shape[1] - self.prompt_length
        probabilities = self.warpers(input_ids, scores.float()).softmax(-1)  # (B, V)
        cumulative = probabilities.double().cumsum(-1)
        threshold = self.uniforms[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        # right=True: the first slice that ends strictly above the threshold, so a token of probability 0 is never
        # taken.
        token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[-1] - 1)
        self.logps.append(probabilities.gather(-1, token)[:, 0].log())
        return torch.full_like(scores, -torch.inf).scatter_(-1, token, 0.0)


def stop_token_ids(model, tokenizer) -> set[int]:
    """End tokens of the tokenizer and of the model's generation config (Qwen ends turns with one, texts with
    another)."""
    declared = model.generation_config.eos_token_id
    declared = declared if isinstance(declared, list) else [declared]
    return {token for token in [*declared, tokenizer.eos_token_id] if token is not None}


@torch.no_grad()
def completion_entropies(
    model, tokenizer, texts: Sequence[str], completions: Sequence[str], *, batch_size: int = 8
) -> list[float]:
    """Mean token entropy of each completion of a rendered prompt, in nats, under the causal language model that
    generated it: one teacher-forced pass, the same for every engine; nan for an empty completion."""
    prompt_ids, completion_ids = (
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in column] for column in (texts, completions)
    )
    scores = score_rows(model, prompt_ids, completion_ids, batch_size=batch_size)
    return [entropies.double().mean().item() for _, entropies in scores]
