"""Startup check: choose forward passes that give the model's own log-probs.

Packing, padding, and TRL's fused head assume that a model is causal, that its layers forward the keyword arguments of
packed attention, and that the head directly follows the backbone. Otherwise training would silently use wrong
log-probs, so those of three short sequences are compared with the logits of the model for each sequence alone."""

import itertools
import logging
from collections.abc import Sequence

import torch

from .forward_pass import ForwardPass
from .generation import undisturbed


logger = logging.getLogger(__name__)

# Tolerances of the mean absolute difference per token, in nats. Rounding causes about 1e-5 in float32, and a few
# hundredths in half precision.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.1

SAME = 2  # number of initial tokens that the two completions of one prompt share


def choose_forward_pass(
    forward_pass: ForwardPass, model: torch.nn.Module, *, values: bool = False, training: bool = True
) -> None:
    """
    Set `forward_pass.packing` and `forward_pass.fused` to the cheapest pass that agrees with the model's own
    log-probs, and log a warning if cheaper ones were rejected. All processes must call this function. It does not
    change weights, training modes, or the random state. `values` is whether the model has one output per token instead
    of logits, `training` whether to compare in training mode, which must be deterministic.

    Raises:
        `ValueError`: if the log-prob of a token depends on later tokens, or if no forward pass agrees.
    """
    prompts, completions = _sequences(forward_pass.config.get_text_config().vocab_size)
    tolerance, model_type = tolerance_of(forward_pass, model), forward_pass.config.model_type
    differences: dict[str, str] = {}
    with undisturbed(model, forward_pass.device):
        model.eval()
        own = [own_outputs(forward_pass, model, *row, values=values) for row in zip(prompts, completions, strict=True)]
        if (change := (own[0][:SAME] - own[1][:SAME]).abs().mean().item()) > tolerance:
            raise ValueError(
                f"This {model_type!r} model is not causal: the log-prob of a token changes by {change:.2g} nats with "
                "the tokens behind it. Use a causal language model."
            )
        model.train(training)
        packings = dict.fromkeys([forward_pass.packing, None])  # the cheaper one first, and the fused head
        for fused, packing in itertools.product([True] if values else [True, False], packings):
            forward_pass.packing, forward_pass.fused = packing, fused
            name = f"{'packed' if packing else 'padded'} with {'fused' if fused else 'own'} head"
            try:
                score = forward_pass.values if values else lambda *rows: forward_pass.compute_logps(*rows).logps
                found = score(model, prompts, completions)
            except Exception as error:  # incompatible layers raise many types of errors
                differences[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            difference = (torch.cat(found).float() - torch.cat(own)).abs().mean().item()
            if difference <= tolerance:
                break
            differences[name] = f"{difference:.2g} nats"
        else:
            raise ValueError(
                f"Training cannot compute the log-probs that this {model_type!r} model gives for one sequence at a "
                f"time. Mean differences per token: {differences}. Use another model, or set startup_check=False to "
                "train with these."
            )
    if differences:
        logger.warning(
            f"Log-probs of this {model_type!r} model are computed {name}. Cheaper forward passes do not reproduce the "
            f"model's own log-probs: {differences} (mean difference per token, or error)."
        )


def disable_noise(*models: torch.nn.Module | None) -> None:
    """Set the rates of dropout, layer drop, and router jitter to 0 where modules store them as floats; TRL's
    `disable_dropout` only changes `nn.Dropout` modules."""
    for module in (module for model in models if model is not None for module in model.modules()):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _sequences(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return two completions of one prompt with the same first tokens, and a shorter one of another prompt. Token ids
    come from the middle of the vocabulary, because special tokens are usually at its start or end."""
    generator = torch.Generator().manual_seed(0)
    low, high = vocab_size // 4, vocab_size // 2 + 1
    sampled = [torch.randint(low, high, (n,), generator=generator).tolist() for n in (5, 2, 6, 6, 4)]
    shared, other, first, second, third = sampled
    return [shared, shared, other], [first, first[:SAME] + second[SAME:], third]


def own_outputs(
    forward_pass: ForwardPass, model, prompt: Sequence[int], completion: Sequence[int], *, values: bool
) -> torch.Tensor:
    """Compute log-probs (or values) `(C,)` of a completion with the model's own head, in float32."""
    with forward_pass.autocast():
        logits = model(
            input_ids=torch.tensor([[*prompt, *completion]], device=forward_pass.device), use_cache=False
        ).logits
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
