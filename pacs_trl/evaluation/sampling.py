"""Sampling with transformers `generate`, with one random stream per completion.

Each completion has a stream of uniforms that depends on its seed alone, and a token is the inverse of the cumulative
distribution at the next uniform. A completion therefore does not depend on the rest of its batch, up to the rounding
of the forward pass; with the same batches it is bit-identical. Global random states are neither read nor changed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..update.generation import generate_sharing_prompts, undisturbed
from .requests import SamplingSettings


def generate_tokens(
    model,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    *,
    pad_token_id: int,
    stop_ids: set[int],
    share_prompts: bool = False,
    **more,
) -> tuple[list[list[int]], list[list[float]] | None]:
    """
    Sample one completion per prompt and seed, in one call of `generate`.

    Args:
        model: Of transformers.
        prompts (`B` sequences of `int`), seeds (`B` of `int`): Token ids and seeds.
        settings ([`SamplingSettings`]): Temperature 0 is greedy decoding.
        pad_token_id (`int`): Padding of prompts, on the left, and of completions.
        stop_ids (set of `int`): Tokens that end a completion.
        share_prompts (`bool`): Whether equal prompts are read once.
        **more: Further arguments of `generate`.

    Returns:
        Token ids of `B` completions, padded to one length after the end token, and their log-probs in nats; `None`
        instead at temperature 0.
    """
    longest = max(len(prompt) for prompt in prompts)
    padded_prompts, masks = [], []
    for prompt in prompts:
        num_padding = longest - len(prompt)
        padded_prompts.append([pad_token_id] * num_padding + list(prompt))
        masks.append([0] * num_padding + [1] * len(prompt))
    input_ids = torch.tensor(padded_prompts)  # (B, longest)
    attention_mask = torch.tensor(masks)
    # `generate` takes unset values from the generation config of the checkpoint, which may have a repetition penalty.
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
    sampler = None
    if settings.temperature > 0:
        sampler = SeededSampler(settings, seeds, prompt_length=longest)
    generate = model.generate
    if share_prompts:
        generate = partial(generate_sharing_prompts, model, model.generate)
    with undisturbed(model, model.device):
        model.eval()
        output = generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([sampler] if sampler else []),
            **more,
        )
    logps = None
    if sampler is not None:
        logps = torch.stack(sampler.logps, dim=1).tolist()
    return output[:, longest:].tolist(), logps


class SeededSampler(LogitsProcessor):
    """
    Logits processor that turns greedy search into sampling with one random stream per completion.

    It applies temperature, top-k, and top-p, samples a token by inverting the cumulative distribution, and sets all
    other logits to -inf, so that the arg max of `generate` is the sampled token. `logps` has their log-probs.
    """

    def __init__(self, settings: SamplingSettings, seeds: Sequence[int], prompt_length: int):
        self.prompt_length = prompt_length
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.temperature))])
        if settings.top_k > 0:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))
        # Philox is counter-based: token t uses uniform number t of its seed in any batch.
        streams = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
        uniforms = np.stack([stream.random(settings.max_new_tokens) for stream in streams])
        self.uniforms = torch.from_numpy(uniforms)  # (B, max_new_tokens) float64
        self.logps: list[torch.Tensor] = []  # of the sampled tokens, (B,) per position

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        step = input_ids.shape[1] - self.prompt_length
        logits: Any = scores.float()  # of a type, Tensor, that the stubs of transformers do not accept
        probabilities = self.warpers(input_ids, logits).softmax(-1)  # (B, V)
        cumulative = probabilities.double().cumsum(-1)
        threshold = self.uniforms[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        # right=True selects the first slice that ends strictly above the threshold: never a token of probability 0.
        token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[-1] - 1)
        self.logps.append(probabilities.gather(-1, token)[:, 0].log())
        chosen: Any = torch.full_like(scores, -torch.inf).scatter_(-1, token, 0.0)
        return chosen


def stop_token_ids(model, tokenizer) -> set[int]:
    """Return the end tokens of the tokenizer and of the generation config (Qwen has one for turns, one for texts)."""
    of_config = model.generation_config.eos_token_id
    if not isinstance(of_config, list):
        of_config = [of_config]
    return {token for token in [*of_config, tokenizer.eos_token_id] if token is not None}
