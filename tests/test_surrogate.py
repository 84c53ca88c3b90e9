"""The losses of probability ratios against TRL's own loss functions, which autograd differentiates in float64."""

import math
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import trl
from seeds import shifted

from pacs_trl.surrogate import (
    LOSS_TYPES,
    RatioLoss,
    completion_scales,
    kl_terms,
    log_importance_weights,
    off_policy_mask,
    ratio_terms,
)


ROWS, TOKENS, MAX_LENGTH, GENERATION_TOKENS = 8, 5, 7, 61.0
TRLS = [name for name in LOSS_TYPES if name != "rloo"]
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def double_by_default():
    """TRL makes tensors of SAPO's temperatures in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def values(seed: int) -> dict[str, torch.Tensor]:
    """A micro-batch with ratios far on both sides of the bounds, advantages of both signs and 0, and an empty row."""
    generator = torch.Generator().manual_seed(shifted(seed))

    def noise(*shape):
        return torch.randn(*shape, generator=generator, **DOUBLE)

    old_logps, advantages = -noise(ROWS, TOKENS).exp(), noise(ROWS)
    advantages[0] = 0.0
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.8
    mask[:, 0], mask[1] = True, False
    return {
        "old_logps": old_logps,
        "logps": old_logps + 0.4 * noise(ROWS, TOKENS),
        "ref_logps": old_logps + 0.3 * noise(ROWS, TOKENS),
        "sampling_logps": old_logps + 0.3 * noise(ROWS, TOKENS),
        "entropies": noise(ROWS, TOKENS).abs(),
        "advantages": advantages,
        "mask": mask,
        "correction": noise(ROWS, TOKENS).mul(0.3).exp(),
    }


class Accelerator:
    num_processes = 1

    def gather(self, x):
        return x

    gather_for_metrics = pad_across_processes = lambda self, x, **kwargs: x

    def reduce(self, x, reduction):
        return x


def trls_gradient(v: dict[str, torch.Tensor], *, quantile=1.0, vllm=False, threshold=None, **settings):
    """Loss of TRL's trainer and its derivative with respect to log pi; all rows are one of two micro-batches."""
    args = trl.GRPOConfig("unused", bf16=False, use_cpu=True, steps_per_generation=4, **settings)
    logps = v["logps"].clone().requires_grad_()
    trainer = SimpleNamespace(
        args=args,
        beta=args.beta,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        top_entropy_quantile=quantile,
        off_policy_mask_threshold=threshold,
        use_vllm=vllm,
        vllm_importance_sampling_correction=vllm,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=2,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, v["entropies"], None),
    )
    trainer.get_high_entropy_mask = lambda *a: trl.GRPOTrainer.get_high_entropy_mask(trainer, *a)
    ids, mask = torch.ones(ROWS, TOKENS, dtype=torch.long), v["mask"].long()
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
    inputs |= {
        "advantages": v["advantages"],
        "old_per_token_logps": v["old_logps"],
        "ref_per_token_logps": v["ref_logps"],
    }
    inputs |= {"num_items_in_batch": torch.tensor(GENERATION_TOKENS, **DOUBLE)}
    if vllm:
        inputs |= {"importance_sampling_ratio": v["correction"], "sampling_per_token_logps": v["sampling_logps"]}
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logps.grad, trainer._metrics["train"]


def own_gradient(v, *, quantile=1.0, vllm=False, threshold=None, **settings):
    """The same from pairs `(c, w)`; the step has twice as many rows as the micro-batch."""
    args = trl.GRPOConfig("unused", bf16=False, use_cpu=True, **settings)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    bounds = (-math.inf, high) if args.loss_type == "cispo" else (1 - args.epsilon, 1 + high)
    loss = RatioLoss(args.loss_type, args.importance_sampling_level, *bounds, args.delta)
    mask, number = v["mask"], v["mask"].sum(dim=1)
    scale = completion_scales(
        args.loss_type,
        number,
        max_completion_length=MAX_LENGTH,
        generation_tokens=torch.full((ROWS,), GENERATION_TOKENS / 2),
    )
    if LOSS_TYPES[args.loss_type][1] != "generation":
        scale = scale / 2
    factors, log_correction = torch.ones_like(v["logps"]), None
    if quantile < 1:
        factors = factors * (v["entropies"] >= v["entropies"][mask].quantile(1 - quantile))
    if threshold is not None:
        sampling = v["sampling_logps"] if vllm else v["old_logps"]
        factors = factors * off_policy_mask(v["logps"], sampling, v["advantages"], mask, threshold)
    if vllm and args.loss_type == "vespo":
        log_correction = v["correction"].log().sum(dim=1, keepdim=True)
    elif vllm:
        factors = factors * v["correction"]
    terms = ratio_terms(
        v["logps"], v["old_logps"], v["advantages"], mask, loss, factors=factors, log_correction=log_correction
    )
    coefficients, logps = -v["advantages"] * scale, v["logps"].clone().requires_grad_()
    log_weights = log_importance_weights(logps - v["old_logps"], mask, args.importance_sampling_level)
    kl = kl_terms(logps, v["ref_logps"], mask, log_weights if args.use_bias_correction_kl else None).sum(dim=1)
    of_kl = args.beta * (scale * kl).sum()
    (gradient,) = torch.autograd.grad(of_kl, logps)
    gradient = gradient + coefficients[:, None] * terms.weights.masked_fill(~mask, 0.0)
    return ((coefficients * terms.values).sum() + of_kl).item(), gradient, terms


BOUNDS = ({}, {"epsilon": 0.1, "epsilon_high": 0.4}, {"delta": 1.5}, {"delta": 1.1})
MORE = [{}, {"quantile": 0.4}, {"threshold": 0.05}, {"vllm": True}, {"vllm": True, "threshold": 0.05, "quantile": 0.6}]


@pytest.mark.parametrize(("loss_type", "level"), product(TRLS, ("token", "sequence")))
def test_the_pair_is_the_derivative_of_trls_loss(loss_type, level):
    for seed, (bounds, more) in enumerate(product(BOUNDS, MORE)):
        for kl in ({}, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False}):
            settings = {"loss_type": loss_type, "importance_sampling_level": level, **bounds, **more, **kl}
            v = values(seed)
            expected, gradient, metrics = trls_gradient(v, **settings)
            loss, found, terms = own_gradient(v, **settings)
            assert loss == pytest.approx(expected, rel=1e-12, abs=1e-14), settings
            torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)
        if loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo") and "delta" not in bounds and level == "token":
            number = v["mask"].sum(dim=1)
            for name, share in (("low", terms.low), ("high", terms.high)):
                mean = (share * number).sum() / number.sum()
                assert metrics[f"clip_ratio/{name}_mean"][-1] == pytest.approx(mean.item())
            assert metrics["clip_ratio/region_mean"][-1] > 0.1  # clips are active on both sides


def test_the_pair_of_rloo_is_the_derivative_of_trls_loss():
    for seed in range(4):
        v = values(seed)
        logps = v["logps"].clone().requires_grad_()
        old_logps = (v["old_logps"] * v["mask"]).sum(dim=1)
        trainer = SimpleNamespace(
            epsilon_low=0.3, epsilon_high=0.4, aux_loss_enabled=False, model=SimpleNamespace(training=True)
        )
        trainer.accelerator, trainer._metrics = Accelerator(), {"train": defaultdict(list)}
        trainer._get_per_token_logps_and_entropies = lambda *a, logps=logps, v=v, **k: (logps, v["entropies"], None)
        ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
        inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": v["mask"].long()}
        inputs |= {"old_logps": old_logps, "advantages": v["advantages"]}
        loss = trl.RLOOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        number = v["mask"].sum(dim=1)
        scale = completion_scales("rloo", number, max_completion_length=MAX_LENGTH, generation_tokens=number)
        pair = RatioLoss("rloo", "completion", 0.7, 1.4)
        terms = ratio_terms(v["logps"], v["old_logps"], v["advantages"], v["mask"], pair)
        coefficients = -v["advantages"] * scale
        counted = coefficients[:, None] * terms.weights.masked_fill(~v["mask"], 0.0)
        torch.testing.assert_close(counted, logps.grad, rtol=1e-12, atol=1e-14)
        v["advantages"][1] = 0.0  # TRL's loss of a row without tokens is -A, a constant
        assert (coefficients * terms.values)[[0, *range(2, ROWS)]].sum().item() == pytest.approx(
            loss.item() - coefficients[1].item()
        )


def row(*values):
    return torch.tensor([values], **DOUBLE)


def test_by_hand():
    """Ratios 2, 1/2 and 1 with bounds 0.8 and 1.2: of a positive advantage the first is clipped, of a negative one the
    second; delta also clips the first of the negative one."""
    logps, old_logps, mask = row(math.log(2), -math.log(2), 0.0), row(0.0, 0.0, 0.0), row(1, 1, 1).bool()

    def weights(advantage, **settings):
        return ratio_terms(logps, old_logps, torch.tensor([advantage]), mask, RatioLoss(**settings))

    assert weights(1.0).weights.tolist() == [[0.0, 0.5, 1.0]]
    assert weights(1.0).values.tolist() == pytest.approx([1.2 + 0.5 + 1])
    assert (weights(1.0).low.item(), weights(1.0).high.item()) == (0.0, pytest.approx(1 / 3))
    assert weights(-1.0).weights.tolist() == [[2.0, 0.0, 1.0]]
    assert weights(-1.0, delta=1.5).weights.tolist() == [[0.0, 0.0, 1.0]]
    assert weights(1.0, loss_type="cispo", high=1.5).weights.tolist() == [[1.5, 0.5, 1.0]]
    # the geometric mean of the ratios is 1, and so is their product
    assert weights(1.0, importance_sampling_level="sequence").weights.tolist() == [[1.0, 1.0, 1.0]]
    assert weights(1.0, loss_type="rloo", importance_sampling_level="completion").values.tolist() == [1.0]
    # SAPO at a ratio of 1 and temperature 1: f = 4 * 1/2, and 4 * 1/4 is its slope
    soft = weights(1.0, loss_type="sapo")
    assert soft.weights[0, 2].item() == 1.0
    # VESPO: log w = 0, so that the weight is exp(3 + 0 - 3)
    assert weights(1.0, loss_type="vespo").weights.tolist() == [[1.0, 1.0, 1.0]]


def test_scales_by_hand():
    number = torch.tensor([2, 0, 6])
    scales = {
        name: completion_scales(
            name, number, max_completion_length=10, generation_tokens=torch.tensor([16.0, 16.0, 4.0])
        ).tolist()
        for name in LOSS_TYPES
    }
    assert scales["grpo"] == scales["sapo"] == pytest.approx([1 / 6, 1 / 3, 1 / 18])
    assert scales["bnpo"] == pytest.approx([1 / 8] * 3) and scales["dr_grpo"] == pytest.approx([1 / 30] * 3)
    assert scales["dapo"] == scales["cispo"] == scales["vespo"] == [1 / 16, 1 / 16, 1 / 4]
    assert scales["luspo"] == scales["rloo"] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("loss_type", "level"), product(LOSS_TYPES, ("token", "sequence", "completion")))
def test_opposite_advantages_on_policy_give_opposite_gradients(loss_type, level):
    """At a ratio of 1 nothing is clipped: every weight is 1 whatever the advantage, and rows do not see each other."""
    v = values(9)
    pair = RatioLoss(loss_type, level)
    for advantages in (v["advantages"], -v["advantages"]):
        terms = ratio_terms(v["logps"], v["logps"], advantages, v["mask"], pair)
        torch.testing.assert_close(terms.weights[v["mask"]], torch.ones_like(v["logps"])[v["mask"]])
    terms = ratio_terms(v["logps"], v["old_logps"], v["advantages"], v["mask"], pair)
    one = ratio_terms(*(v[name][3:4] for name in ("logps", "old_logps", "advantages", "mask")), pair)
    torch.testing.assert_close(one.weights, terms.weights[3:4], rtol=0, atol=0)
