"""Startup check: choose forward passes that reproduce the log-probs of the model.

Packing, padding, and TRL's fused head assume that a model is causal, that its layers forward the keyword arguments of
packed attention, and that the head directly follows the backbone. Otherwise training would silently use wrong
log-probs, so those of three short sequences are compared with the logits of the model for each sequence alone. If the
model has layers with an attention window, and rollouts can be longer, so are those of two completions of a prompt that
is longer than the window; if it has recurrences, of a prompt that is longer than their chunks; if prompts have images,
of a prompt with an image.

Packed layers could also read the sequence in front, which half precision may hide. All other sequences are therefore
replaced, which must leave the log-probs of the last one as they are.

Weights that start at zero, as those of adapters do, would hide what they read: the check fills them meanwhile."""

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..errors import UserError
from .compiled_layers import CompiledLayers, NotTraced, num_graphs
from .context_length import attention_windows, context_lengths
from .forward_pass import ForwardPass
from .generation import undisturbed
from .prompt_images import PromptImages, padded_image_inputs
from .reference import local_shard, only_shards, reshard


logger = logging.getLogger(__name__)

# Tolerances of the mean absolute difference per token, in nats. Rounding causes about 1e-5 in float32, and a few
# hundredths in half precision.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.1

SAME = 2  # number of initial tokens that the two completions of one prompt share

MOST_GRAPHS = 16  # of compiled layers in the passes of the check; more do not trace

# Tolerance in nats of what a packed sequence changes by with its neighbors, in any precision: the same products are
# computed. Those of experts round otherwise with other numbers of tokens.
NEIGHBOR_TOLERANCE, EXPERTS_TOLERANCE = 1e-3, 0.02

FILLING = 0.02  # standard deviation of what fills weights that are zero

_CHUNKS = (64, 256)  # lengths of the chunks of recurrences: of delta rules, and of state-space layers

_ENDING = 8  # number of compared tokens of the sequence that is longer than the window

TextBatch = tuple[list[list[int]], list[list[int]]]  # prompts and completions
Batch = tuple[list[list[int]], list[list[int]], list[PromptImages | None]]  # prompts, completions, images of prompts

ImagePrompt = tuple[list[int], PromptImages | None]  # its token ids and its images


def choose_forward_pass(
    forward_pass: ForwardPass,
    model: torch.nn.Module,
    *,
    values: bool = False,
    training: bool = True,
    has_dropout: bool = False,
    longest: int | None = None,
    image_prompt: ImagePrompt | None = None,
) -> None:
    """
    Set `forward_pass.packing` and `forward_pass.fused` to the cheapest pass that agrees with the log-probs of the
    model, and log a warning if cheaper ones were rejected. All processes must call this function. It does not
    change weights, training modes, or the random state. `values` is whether the model has one output per token instead
    of logits, `training` whether to compare in training mode, which must be deterministic. With `has_dropout`, passes
    in training mode are random, and only have to run. `longest` is the largest number of tokens of a prompt and its
    completion; by default it is the context length of the model. Of an `image_prompt` (token ids and images), two
    completions are compared, beside one of a text.

    Raises:
        `ValueError`: if the log-prob of a token depends on later tokens, or if no forward pass agrees.
    """
    model_type = forward_pass.config.model_type
    tolerance = tolerance_of(forward_pass, model)
    neighbor_tolerance = min(_neighbor_tolerance(forward_pass.model), tolerance)
    batches = _batches(forward_pass, longest, image_prompt)
    rejected: dict[str, str] = {}  # cheaper passes, and why they were rejected
    with undisturbed(model, forward_pass.device), zeros_filled(model):
        model.eval()
        expected_logps = [_outputs_of_model(forward_pass, model, batch, values=values) for batch in batches]
        _check_causality(expected_logps[0], tolerance, model_type)

        # From the cheapest pass on: the fused head before the head of the model, packed before padded.
        heads = [True, False] if forward_pass.fused and not values else [forward_pass.fused]
        packings = dict.fromkeys([forward_pass.packing, None])
        for fused, packing in itertools.product(heads, packings):
            forward_pass.packing, forward_pass.fused = packing, fused
            model.train(training)
            name = f"{'packed' if packing else 'padded'} with {'fused' if fused else 'own'} head"
            try:
                difference = _largest_difference(forward_pass, model, batches, expected_logps, values=values)
                change = _largest_change_with_neighbors(forward_pass, model, batches, values=values)
                if has_dropout:  # packed attention lacks some kinds of it
                    model.train()
                    _outputs(forward_pass, model, batches[0], values=values)
            except Exception as error:  # incompatible layers raise many types of errors
                rejected[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            if difference <= tolerance and change <= neighbor_tolerance:
                break
            rejected[name] = f"{difference:.2g} nats"
            if change > neighbor_tolerance:
                rejected[name] += f", {change:.2g} nats by other sequences beside it"
        else:
            raise UserError(
                f"Training cannot compute the log-probs that this {model_type!r} model gives for one sequence at a "
                f"time. Mean differences per token: {rejected}. Use another model, or set startup_check=False to "
                "train with these."
            )
    if rejected:
        logger.warning(
            f"Log-probs of this {model_type!r} model are computed {name}. Cheaper forward passes do not reproduce the "
            f"log-probs of the model: {rejected} (mean difference per token, or error)."
        )


def compile_layers(
    forward_pass: ForwardPass, model: torch.nn.Module, *, training: bool = True, check: bool = True
) -> str | None:
    """
    Compile the decoder layers of a chosen forward pass, forward and backward, and set `forward_pass.compiled_layers`.
    All processes must call this function.

    Args:
        forward_pass ([`ForwardPass`]), model (`torch.nn.Module`), training (`bool`): See [`choose_forward_pass`].
        check (`bool`): Whether to run the compiled layers and compare log-probs with those of eager layers. Otherwise
            the first passes compile them.

    Returns:
        `str`, *optional*: Why layers are not compiled: a loss of routers, an error, more than 16 graphs, new graphs
        for new lengths, or other log-probs.
    """
    if forward_pass.reads_routers:  # a pass without gradient would keep what all layers store for a backward pass
        return "the loss of the routers (router_aux_loss_coef) reads what the layers compute inside"
    try:
        compiled_layers = CompiledLayers(forward_pass.model)
    except ValueError as error:
        return str(error)
    if not check:
        forward_pass.compiled_layers = compiled_layers
        return None
    with undisturbed(model, forward_pass.device), compiled_layers.tried_out(MOST_GRAPHS):
        model.train(training)
        for batch in _batches_of_other_lengths(forward_pass.config):
            expected = torch.cat(forward_pass.compute_logps(model, *batch).logps)
            number = num_graphs()
            forward_pass.compiled_layers = compiled_layers
            try:
                computed = torch.cat(forward_pass.compute_logps(model, *batch).logps)
            except NotTraced as error:
                return str(error)
            except Exception as error:  # compilers raise many types of errors
                return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            finally:
                forward_pass.compiled_layers = None
            difference = (computed - expected).abs().mean().item()
            if not difference <= tolerance_of(forward_pass, model):
                return f"compiled, their log-probs differ by {difference:.2g} nats per token"
    if num_graphs() > number:
        return "they do not trace with dynamic shapes: sequences of other lengths made new graphs"
    forward_pass.compiled_layers = compiled_layers
    return None


@contextmanager
def zeros_filled(model: torch.nn.Module) -> Iterator[None]:
    """Fill trained weights of which all are zero (on this process) with small random numbers inside the context."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reshard(model)
    with torch.no_grad(), only_shards(parameters):
        zeros = [shard for parameter in parameters if not (shard := local_shard(parameter)).any()]
        generator = torch.Generator().manual_seed(0)  # the same numbers in all processes with the same weights
        for shard in zeros:
            shard.copy_(FILLING * torch.randn(shard.shape, generator=generator))
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad(), only_shards(parameters):
            for shard in zeros:
                shard.zero_()


def disable_noise(*models: torch.nn.Module | None) -> None:
    """Set the rates of dropout, layer drop, and router jitter to 0 where modules store them as floats; TRL's
    `disable_dropout` only changes `nn.Dropout` modules."""
    for module in (module for model in models if model is not None for module in model.modules()):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


# Comparisons --------------------------------------------------------------------------------------------------------


def _check_causality(logps: list[torch.Tensor], tolerance: float, model_type: str) -> None:
    """Raise a `ValueError` unless the first two completions of [`_short_sequences`], which begin with the same tokens,
    have the same log-probs there."""
    first, second = logps[:2]
    change = (first[:SAME] - second[:SAME]).abs().mean().item()
    if change > tolerance:
        raise UserError(
            f"This {model_type!r} model is not causal: the log-prob of a token changes by {change:.2g} nats with "
            "the tokens behind it. Use a causal language model, and an adapter that is causal too."
        )


def _largest_difference(
    forward_pass: ForwardPass, model, batches: list[Batch], expected: list[list[torch.Tensor]], *, values: bool
) -> float:
    """Return the largest mean absolute difference per token, of all batches, between log-probs (or values) and the
    `expected` ones; NaN if one is NaN."""
    differences = []
    for batch, expected_of_batch in zip(batches, expected, strict=True):
        computed = _outputs(forward_pass, model, batch, values=values)
        difference = (torch.cat(computed).float() - torch.cat(expected_of_batch)).abs().mean()
        differences.append(difference.item())
    return torch.tensor(differences).max().item()  # unlike `max` of Python, NaN if one is NaN


def _largest_change_with_neighbors(forward_pass: ForwardPass, model, batches: list[Batch], *, values: bool) -> float:
    """Return the largest mean absolute change per token, of all batches, of the last packed sequence when all others
    are replaced; 0 without packing, and NaN if one is NaN."""
    if forward_pass.packing is None:
        return 0.0
    changes = [0.0]
    for batch in batches:
        last = _last_packed(batch)
        other_neighbors = _with_other_neighbors(batch, last, forward_pass.config)
        first = _outputs(forward_pass, model, batch, values=values)[last]
        second = _outputs(forward_pass, model, other_neighbors, values=values)[last]
        changes.append((first.float() - second.float()).abs().mean().item())
    return torch.tensor(changes).max().item()


def _last_packed(batch: Batch) -> int:
    """Return the index of the sequence that is packed last: prompts are packed in the order of their first sequences,
    each with all its completions."""
    prompts, _, _ = batch
    distinct_prompts = list(dict.fromkeys(map(tuple, prompts)))
    return max(range(len(prompts)), key=lambda i: (distinct_prompts.index(tuple(prompts[i])), i))


def _with_other_neighbors(batch: Batch, kept: int, config: PreTrainedConfig) -> Batch:
    """Return a batch with other tokens of the same lengths in all completions but `kept`, and in all prompts but its
    own and those with images."""
    prompts, completions, images = batch
    sample = _token_sampler(config, seed=1)
    other_prompts: dict[tuple[int, ...], list[int]] = {}
    for prompt, prompt_images in zip(prompts, images, strict=True):
        is_kept = prompt_images is not None or prompt == prompts[kept]
        other_prompts[tuple(prompt)] = list(prompt) if is_kept else sample(len(prompt))
    other_completions = [
        completion if i == kept else sample(len(completion)) for i, completion in enumerate(completions)
    ]
    return [other_prompts[tuple(prompt)] for prompt in prompts], other_completions, images


def _neighbor_tolerance(model: torch.nn.Module) -> float:
    has_experts = any("expert" in name for name, _ in model.named_parameters())
    return EXPERTS_TOLERANCE if has_experts else NEIGHBOR_TOLERANCE


def _outputs(forward_pass: ForwardPass, model, batch: Batch, *, values: bool) -> list[torch.Tensor]:
    """Compute log-probs (or values) with the forward pass."""
    prompts, completions, images = batch
    if values:
        return forward_pass.values(model, prompts, completions)
    return forward_pass.compute_logps(model, prompts, completions, images).logps


def _outputs_of_model(forward_pass: ForwardPass, model, batch: Batch, *, values: bool) -> list[torch.Tensor]:
    """Compute log-probs (or values) with the head of the model, each sequence alone."""
    return [
        model_head_outputs(forward_pass, model, prompt, completion, images, values=values)
        for prompt, completion, images in zip(*batch, strict=True)
    ]


# Sequences ----------------------------------------------------------------------------------------------------------


def _batches(forward_pass: ForwardPass, longest: int | None, image_prompt: ImagePrompt | None) -> list[Batch]:
    """Return the micro-batches to compare: three short sequences, two that are longer than the largest attention
    window or chunk that sequences of `longest` tokens can exceed, if there is one, and two with an image and one
    without."""
    config = forward_pass.config
    sample = _token_sampler(config)
    text_batches = [_short_sequences(sample)]
    context = min((length for length in context_lengths(config).values() if length), default=math.inf)
    reaches = attention_windows(config)
    if forward_pass.state_modules:
        reaches = [*reaches, *_CHUNKS]
    longest_sequence = min(longest or math.inf, context)
    exceeded = [reach for reach in reaches if reach < longest_sequence]
    if exceeded:
        reach = max(exceeded)
        length = reach + max(reach // 8, 4 * _ENDING)
        text_batches.append(_sequences_that_repeat_their_start(sample, int(min(length, context))))
    batches: list[Batch] = [(prompts, completions, [None] * len(prompts)) for prompts, completions in text_batches]
    if image_prompt is not None:
        prompt, images = image_prompt
        _, completions = _short_sequences(sample)
        batches.append(([prompt, sample(3), prompt], completions, [images, None, images]))
    return batches


def _token_sampler(config: PreTrainedConfig, seed: int = 0) -> Callable[[int], list[int]]:
    """Return a function that samples a number of token ids, always the same ones. They come from the middle of the
    vocabulary, because special tokens are usually at its start or end."""
    vocab_size = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return lambda n: torch.randint(vocab_size // 4, vocab_size // 2 + 1, (n,), generator=generator).tolist()


def _batches_of_other_lengths(config: PreTrainedConfig) -> list[TextBatch]:
    """Return micro-batches with shared prompts, with none, and of one sequence, and one like the first with other
    lengths. The longest sequences have prime lengths, because dynamo makes a size constant that equals another one of
    the model."""
    sample = _token_sampler(config)

    def batch(*groups: tuple[int, list[int]]) -> TextBatch:  # length of the prompt, and those of its completions
        prompts: list[list[int]] = []
        for length, completions in groups:
            prompts += [sample(length)] * len(completions)
        return prompts, [sample(length) for _, completions in groups for length in completions]

    return [
        batch((7, [5, 10]), (4, [6, 3])),
        batch((6, [7]), (3, [8])),
        batch((12, [11])),
        batch((5, [4, 14]), (8, [7, 3]), (2, [6])),
    ]


def _short_sequences(sample: Callable[[int], list[int]]) -> TextBatch:
    """Return two completions of one prompt with the same first tokens, and a shorter one of another prompt."""
    shared, other = sample(5), sample(2)
    first, second, third = sample(6), sample(6), sample(4)
    return [shared, shared, other], [first, first[:SAME] + second[SAME:], third]


def _sequences_that_repeat_their_start(sample: Callable[[int], list[int]], length: int) -> TextBatch:
    """Return two sequences with one prompt whose last tokens are its first ones, so that models that attend to its
    start predict them."""
    start = sample(2 * _ENDING)
    middle = sample(length - 2 * len(start))
    prompt = [*start, *middle, *start[:_ENDING]]
    return [prompt, prompt], [start[_ENDING:], start[_ENDING : _ENDING + SAME] + sample(_ENDING - SAME)]


def model_head_outputs(
    forward_pass: ForwardPass,
    model,
    prompt: Sequence[int],
    completion: Sequence[int],
    images: PromptImages | None = None,
    *,
    values: bool,
) -> torch.Tensor:
    """Compute log-probs (or values) `(C,)` of a completion with the head of the model, in float32."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[*prompt, *completion]])}
    inputs |= padded_image_inputs([images], len(prompt) + len(completion))
    inputs = {name: value.to(forward_pass.device) for name, value in inputs.items()}
    if "logits_to_keep" in inspect.signature(type(forward_pass.model).forward).parameters:
        inputs["logits_to_keep"] = len(completion) + 1
    with forward_pass.autocast():
        logits = model(**inputs, use_cache=False).logits
    logits = logits[0, -len(completion) - 1 : -1].float()
    if values:
        return logits[:, 0]
    logps = (logits / forward_pass.temperature).log_softmax(dim=-1)
    return logps.gather(1, torch.tensor(completion, device=forward_pass.device)[:, None])[:, 0]


def tolerance_of(forward_pass: ForwardPass, model: torch.nn.Module) -> float:
    """Return the tolerance of the dtype in which the model computes."""
    with forward_pass.autocast():
        rounds = torch.is_autocast_enabled(forward_pass.device.type)
    rounds |= torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
    rounds |= any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    return HALF_PRECISION_TOLERANCE if rounds else TOLERANCE
