"""Startup check: choose forward passes that give the model's own log-probs.

Packing, padding, and TRL's fused head assume that a model is causal, that its layers pass the inputs of packed
attention on, and that nothing lies between backbone and head. Where an assumption does not hold, training would
silently use wrong log-probs. So before training, the log-probs of three short sequences are computed as in training
and compared with the logits that the model gives for each of them alone.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .scorer import Scorer


logger = logging.getLogger(__name__)

# Bounds on the mean absolute difference per token, in nats: rounding explains 1e-5 in float32, and a few hundredths in
# half precision.
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.1

SAME = 2  # tokens with which the completions of one prompt begin


def choose_forward_pass(
    scorer: Scorer, model: torch.nn.Module, *, values: bool = False, training: bool = True
) -> None:
    """
    Set `scorer.packing` and `scorer.fused` to the cheapest forward pass that agrees with `model` itself, and warn if
    that is not the one they were set to. All processes must call it. Weights, modes and random state stay as they are.

    Args:
        scorer ([`Scorer`]), model (`torch.nn.Module`): The model as it is trained, wrapped or not, and its scorer.
        values (`bool`): Whether the model has one output per token instead of logits.
        training (`bool`): Whether to compare passes in training mode, which must be deterministic; else in evaluation
            mode.

    Raises:
        `ValueError`: if the log-prob of a token depends on later tokens, or if no forward pass agrees.
    """
    prompts, completions = _sequences(scorer.config.get_text_config().vocab_size)
    tolerance, model_type = _tolerance(scorer, model), scorer.config.model_type
    differences: dict[str, str] = {}
    with _undisturbed(model, scorer.device):
        model.eval()
        own = [_own_outputs(scorer, model, *row, values=values) for row in zip(prompts, completions, strict=True)]
        if (change := (own[0][:SAME] - own[1][:SAME]).abs().mean().item()) > tolerance:
            raise ValueError(
                f"This {model_type!r} model is not causal: the log-prob of a token changes by {change:.2g} nats with "
                "the tokens behind it. Use a causal language model."
            )
        model.train(training)
        for packing, fused in _candidates(scorer, values):
            scorer.packing, scorer.fused = packing, fused
            name = f"{'packed' if packing else 'padded'} with {'fused' if fused else 'own'} head"
            try:
                score = scorer.values if values else lambda *rows: scorer.score(*rows).logps
                found = score(model, prompts, completions)
            except Exception as error:  # layers that do not get what they expect fail in many ways
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
            f"Log-probs of this {model_type!r} model are computed {name}. Cheaper ways differ from the model's own "
            f"log-probs: {differences} (mean per token, or error)."
        )


def disable_noise(*models: torch.nn.Module | None) -> None:
    """Set rates of dropout, dropped layers, and router noise that layers keep as numbers to 0, which TRL's
    `disable_dropout` does not reach."""
    for module in (module for model in models if model is not None for module in model.modules()):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _sequences(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Two completions of one prompt with the same first tokens, and a shorter one of another prompt. Special tokens
    are usually the first or last of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    low, high = vocab_size // 4, vocab_size // 2 + 1
    drawn = [torch.randint(low, high, (n,), generator=generator).tolist() for n in (5, 2, 6, 6, 4)]
    shared, other, first, second, third = drawn
    return [shared, shared, other], [first, first[:SAME] + second[SAME:], third]


@contextmanager
def _undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _own_outputs(
    scorer: Scorer, model, prompt: Sequence[int], completion: Sequence[int], *, values: bool
) -> torch.Tensor:
    with scorer.autocast():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]], device=scorer.device), use_cache=False).logits
    logits = logits[0, -len(completion) - 1 : -1].float()
    if values:
        return logits[:, 0]
    logps = (logits / scorer.temperature).log_softmax(dim=-1)
    return logps.gather(1, torch.tensor(completion, device=scorer.device)[:, None])[:, 0]


def _tolerance(scorer: Scorer, model: torch.nn.Module) -> float:
    with scorer.autocast():
        rounds = torch.is_autocast_enabled(scorer.device.type)
    rounds |= torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
    rounds |= any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
    return HALF_PRECISION_TOLERANCE if rounds else TOLERANCE


def _candidates(scorer: Scorer, values: bool) -> list[tuple[str | None, bool]]:
    packings = [scorer.packing] if scorer.padding_free == "always" else dict.fromkeys([scorer.packing, None])
    return [(packing, fused) for fused in ([True] if values else [True, False]) for packing in packings]
