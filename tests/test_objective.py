"""The objective against paper arithmetic, the authors' numbers, autograd, and enumeration of a tiny policy."""

import itertools
import json
import math
import struct
from pathlib import Path

import pytest
import torch
from support.seeds import shifted
from support.tolerances import rounding_atol

from pacs_trl.objective import (
    actor_coefficients,
    class_weights,
    group_scores,
    loss_from_proxies,
    pacs_loss,
    proxy_coefficients,
    sequence_proxies,
)


NAN = float("nan")
ESTIMATORS = ["rloo", "dr_grpo", "grpo", "none"]
WEIGHTINGS = ["balanced", "none", "only_positive", "only_negative"]
REFERENCE_CASES = json.loads((Path(__file__).parent / "data" / "pacs_loss_vectors.json").read_text())


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def kinds(estimator="rloo", weighting="balanced", num_generations=6):
    return {"num_generations": num_generations, "score_estimator": estimator, "class_weighting": weighting}


def zeros(number):
    return torch.zeros(number, dtype=torch.float64)


class TestByHand:
    def test_proxy_is_a_masked_sum_of_log_ratios_or_a_mean_of_log_probs(self):
        logps = double([[-1.0, -2.0, -3.0], [-0.5, NAN, NAN]])
        ref_logps = double([[-1.5, -2.0, -1.0], [-1.0, NAN, NAN]])
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        # row 0: (-1 + 1.5) + (-2 + 2) = 0.5; row 1: -0.5 + 1 = 0.5; times beta = 2
        proxies = sequence_proxies(logps, ref_logps, mask, pacs_beta=2.0)
        torch.testing.assert_close(proxies, double([1.0, 1.0]))
        # 2 * (-1 - 2) / 2 without reference; an empty row is 0
        mask, no_reference = torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.full_like(logps, NAN)
        proxies = sequence_proxies(logps, no_reference, mask, pacs_beta=2.0, proxy="mean_logp")
        torch.testing.assert_close(proxies, double([-3.0, 0.0]))

    def test_scores_of_a_group_of_four_equal_those_worked_by_hand(self):
        proxies, labels = double([1.0, 2.0, 3.0, 6.0]), double([1, 0, 0, 1])
        # mean 3; others' means 11/3, 10/3, 3, 2; deviations -2 -1 0 3, squares sum 14, unbiased variance 14/3
        expected = {
            "rloo": [1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0],
            "dr_grpo": [-2.0, -1.0, 0.0, 3.0],
            "grpo": [d / (math.sqrt(14 / 3) + 1e-6) for d in (-2.0, -1.0, 0.0, 3.0)],
            "none": [1.0, 2.0, 3.0, 6.0],
        }
        for estimator, values in expected.items():
            scores = group_scores(proxies, labels, num_generations=4, score_estimator=estimator)
            torch.testing.assert_close(scores, double(values))

    def test_class_weights_of_one_correct_in_four_equal_those_worked_by_hand(self):
        labels = double([1, 0, 0, 0])
        # balanced: 4 / (2 * 1) = 2 for the correct one, 4 / (2 * 3) = 2/3 for each wrong one
        expected = {
            "balanced": [2.0, 2 / 3, 2 / 3, 2 / 3],
            "none": [1.0, 1.0, 1.0, 1.0],
            "only_positive": [1.0, 0.0, 0.0, 0.0],
            "only_negative": [0.0, 1.0, 1.0, 1.0],
        }
        for weighting, values in expected.items():
            weights, targets = class_weights(labels, num_generations=4, class_weighting=weighting)
            torch.testing.assert_close(weights, torch.tensor(values))
            assert targets.tolist() == [1.0, 0.0, 0.0, 0.0]  # the labels, whatever the weights

    def test_class_weights_of_a_one_class_group_are_one(self):
        labels = double([1, 1, 1, 0, 0, 0])
        weights, targets = class_weights(labels, num_generations=3)
        assert weights.tolist() == [1.0] * 6 and targets.tolist() == labels.tolist()

    def test_class_weights_of_soft_labels_equal_those_worked_by_hand(self):
        # sum R = 1, sum (1 - R) = 1, n = 2: p = R * 2/2 and q = (1 - R) * 2/2, so weight 1 and target R
        weights, targets = class_weights(double([0.25, 0.75]), num_generations=2)
        assert weights.tolist() == [1.0, 1.0] and targets.tolist() == [0.25, 0.75]
        # sum R = 1.5, sum (1 - R) = 0.5: p = 2/3 and 0.5 * 2/3, q = 0 and 0.5 * 2/1
        weights, targets = class_weights(double([1.0, 0.5]), num_generations=2)
        torch.testing.assert_close(weights, torch.tensor([2 / 3, 1 / 3 + 1.0]))
        torch.testing.assert_close(targets, double([1.0, (1 / 3) / (1 / 3 + 1.0)]))
        # one half only: of R = 0.2 the positive half weighs 0.2 and asks for 1, the negative half 0.8 and asks for 0
        for weighting, values in {"none": ([1, 1], [0.2, 1]), "only_positive": ([0.2, 1], [1, 1])}.items():
            weights, targets = class_weights(double([0.2, 1.0]), num_generations=2, class_weighting=weighting)
            assert (weights.tolist(), targets.tolist()) == (torch.tensor(values[0]).float().tolist(), values[1])
        weights, targets = class_weights(double([0.2, 1.0]), num_generations=2, class_weighting="only_negative")
        assert (weights.tolist(), targets.tolist()) == (torch.tensor([0.8, 0.0]).tolist(), [0.0, 1.0])

    def test_loss_of_a_group_of_two_equals_that_worked_by_hand(self):
        logps, ref_logps = double([[-1.0, -1.0], [-2.0, 0.0]]), double([[-1.5, -1.0], [-1.0, 0.0]])
        result = pacs_loss(
            logps, ref_logps, torch.tensor([[1, 1], [1, 0]]), double([1, 0]), num_generations=2, pacs_beta=2.0
        )
        # proxies 2 * 0.5 = 1 and 2 * -1 = -2; scores 1 - (-2) = 3 and -2 - 1 = -3; balanced weights 1 and 1;
        # both losses are -log sigmoid(3)
        torch.testing.assert_close(result.proxies, double([1.0, -2.0]))
        torch.testing.assert_close(result.scores, double([3.0, -3.0]))
        assert result.loss.item() == pytest.approx(math.log(1 + math.exp(-3)), rel=1e-12)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("weighting", ["balanced", "none"])
    def test_loss_starts_at_log_two(self, estimator, weighting):
        labels = double([1, 0, 0, 0, 1, 1, 1, 1])
        loss, _ = loss_from_proxies(zeros(8), labels, **kinds(estimator, weighting, 4))
        # float64, but for the weights, each of which is rounded to float32 once
        assert loss.item() == pytest.approx(math.log(2), abs=rounding_atol(1, math.log(2)))

    def test_coefficients_at_the_first_update_equal_those_worked_by_hand(self):
        # one correct of four, balanced, psi = 0: e = (2 * -0.5, 2/3 * 0.5 ...) / 4 = (-1/4, 1/12, 1/12, 1/12), mean 0,
        # so c = 4/3 * e
        coefficients = proxy_coefficients(zeros(4), double([1, 0, 0, 0]), num_generations=4)
        torch.testing.assert_close(coefficients, double([-1 / 3, 1 / 9, 1 / 9, 1 / 9]))

    def test_nothing_scorable_gives_zero_not_nan(self):
        proxies = torch.ones(4, requires_grad=True)
        loss, _ = loss_from_proxies(proxies, torch.full((4,), NAN), num_generations=2)
        loss.backward()
        assert loss.item() == 0.0 and proxies.grad.abs().sum() == 0

    @pytest.mark.parametrize(("rows", "num_generations"), [(4, 1), (5, 2), (4, 8)])
    def test_rows_that_are_not_whole_groups_are_refused(self, rows, num_generations):
        with pytest.raises(ValueError, match=f"num_generations={num_generations} for {rows} completions"):
            loss_from_proxies(torch.zeros(rows), torch.zeros(rows), num_generations=num_generations)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_reductions_are_float32_whatever_comes_in(self, dtype):
        # 4096 terms of 2^-9: bf16 accumulation stalls at 2^-1 or so, float32 gives exactly 8
        logps = torch.full((2, 4096), 2.0**-9, dtype=dtype)
        result = pacs_loss(
            logps, torch.zeros_like(logps), torch.ones(2, 4096), torch.tensor([1.0, 0.0]), num_generations=2
        )
        assert result.proxies.dtype == result.scores.dtype == result.loss.dtype == torch.float32
        assert result.proxies.tolist() == [8.0, 8.0]


class TestAuthorsNumbers:
    @pytest.mark.parametrize("case", REFERENCE_CASES, ids=range(len(REFERENCE_CASES)))
    def test_loss_and_gradient_equal_the_reference(self, case):
        estimator = {"rloo": "rloo", "naive": "none", "grpo": "grpo" if case["norm_std"] else "dr_grpo"}
        weighting = {"question": "balanced"}.get(case["weight_mode"], case["weight_mode"])
        logps = double(case["logps"]).requires_grad_()
        mask = torch.arange(logps.shape[1]) < torch.tensor(case["lengths"]).unsqueeze(1)
        how = kinds(estimator[case["estimator"]], weighting if case["use_weight"] else "none", case["num_generations"])
        proxy = {"1": "log_ratio", "2": "mean_logp"}[case["reward_method"]]
        labels = double(case["labels"])
        result = pacs_loss(logps, double(case["old_logps"]), mask, labels, pacs_beta=case["beta"], proxy=proxy, **how)
        (gradient,) = torch.autograd.grad(result.loss, logps)
        expected = double(case["grad_wrt_first_token"])
        assert abs(result.loss.item() - case["loss"]) < 1e-9
        assert (gradient[:, 0] - expected).abs().max() < 1e-9

        coefficients = proxy_coefficients(result.proxies.detach(), labels, **how)
        slope = case["beta"] * (1 / mask.sum(-1) if proxy == "mean_logp" else 1)
        assert (coefficients * slope - expected).abs().max() < 1e-9


def random_case(seed, num_prompts=5, num_generations=6, soft=False, unlabelled=True):
    generator = torch.Generator().manual_seed(shifted(seed))
    shape = (num_prompts * num_generations,)
    proxies = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.rand(shape, generator=generator, dtype=torch.float64)
    labels = labels if soft else (labels > 0.6).double()
    labels[:num_generations] = 1.0  # one group of one class
    if unlabelled:
        labels[7] = NAN
        labels[-num_generations + 1 :] = NAN  # one group with a single scorable row
    return proxies, labels


def loop_loss(proxies, labels, num_generations, estimator, weighting):
    """The loss again, one number at a time, from the paper's words rather than from tensors."""
    groups = [
        [(p, r) for p, r in zip(proxies[i : i + num_generations], labels[i : i + num_generations]) if r == r]
        for i in range(0, len(proxies), num_generations)
    ]
    groups = [g for g in groups if len(g) >= 2]
    total = 0.0
    for group in groups:
        n = len(group)
        n_pos, n_neg = sum(r for _, r in group), sum(1 - r for _, r in group)
        mean = sum(p for p, _ in group) / n
        std = math.sqrt(sum((p - mean) ** 2 for p, _ in group) / (n - 1))
        for i, (p, r) in enumerate(group):
            psi = {
                "rloo": p - sum(q for j, (q, _) in enumerate(group) if j != i) / (n - 1),
                "dr_grpo": p - mean,
                "grpo": (p - mean) / (std + 1e-6),
                "none": p,
            }[estimator]
            up, down = {
                "balanced": (r * n / (2 * n_pos), (1 - r) * n / (2 * n_neg)) if n_pos and n_neg else (r, 1 - r),
                "none": (r, 1 - r),
                "only_positive": (r, 0.0),
                "only_negative": (0.0, 1 - r),
            }[weighting]
            # the authors keep weights in float32
            rounding = struct.unpack("f", struct.pack("f", up + down))[0] / (up + down) if up + down else 0.0
            sigma = 1 / (1 + math.exp(-psi))
            total -= rounding * (up * math.log(sigma) + down * math.log(1 - sigma))
    return total / sum(len(g) for g in groups)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("soft", [False, True])
class TestAgainstReferences:
    def test_loss_equals_the_loop_and_coefficients_equal_autograd(self, estimator, weighting, soft):
        proxies, labels = random_case(0, soft=soft)
        leaf = proxies.clone().requires_grad_()
        loss, _ = loss_from_proxies(leaf, labels, **kinds(estimator, weighting))
        expected = loop_loss(proxies.tolist(), labels.tolist(), 6, estimator, weighting)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        (expected,) = torch.autograd.grad(loss, leaf)
        coefficients = proxy_coefficients(proxies, labels, **kinds(estimator, weighting))
        scale = expected.abs().max().item()
        assert (coefficients - expected).abs().max() < rounding_atol(32, scale, torch.float64)
        assert not coefficients.requires_grad


class TestProperties:
    @pytest.mark.parametrize("estimator", ["rloo", "dr_grpo"])
    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_coefficients_of_a_group_sum_to_zero(self, estimator, weighting):
        proxies, labels = random_case(3)
        coefficients = proxy_coefficients(proxies, labels, **kinds(estimator, weighting))
        groups = coefficients.view(-1, 6)
        assert groups.sum(1).abs().max() < rounding_atol(16, groups.abs().sum(1).max().item(), torch.float64)
        assert coefficients.abs().max() > 1e-3

    @pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "grpo"])
    @pytest.mark.parametrize("value", [0.0, 1.0, 0.3])
    @pytest.mark.parametrize("num_generations", [2, 3, 5, 6, 7, 8])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_class_groups_are_exactly_zero_at_proxy_zero(self, estimator, value, num_generations, dtype):
        labels = torch.full((num_generations,), value, dtype=dtype)
        for weighting in WEIGHTINGS:
            start = torch.zeros(num_generations, dtype=dtype)
            coefficients = proxy_coefficients(start, labels, **kinds(estimator, weighting, num_generations))
            assert (coefficients == 0).all()

    @pytest.mark.parametrize("value", [0.0, 0.3])
    def test_the_grpo_score_does_not_divide_a_group_of_equal_proxies(self, value):
        # R = 1, 1, 0, 0 and psi = 0: weights 1, e = (sigmoid(0) - R) / 4 = -+1/8, mean 0; divided by 1e-6 it would be
        # 125,000
        labels = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        proxies = torch.full((4,), value, dtype=torch.float64, requires_grad=True)
        loss, scores = loss_from_proxies(proxies, labels, num_generations=4, score_estimator="grpo")
        coefficients = proxy_coefficients(proxies, labels, num_generations=4, score_estimator="grpo")
        assert (scores == 0).all()
        assert coefficients.tolist() == [-0.125, -0.125, 0.125, 0.125]
        assert torch.autograd.grad(loss, proxies)[0].tolist() == coefficients.tolist()

    @pytest.mark.parametrize(
        ("spread", "ratio", "cosine"),
        [(1e-6, 440_000, 0.96), (1e-4, 9700, 0.86), (0.005, 196, 0.86), (0.02, 49, 0.86)]
        + [(0.1, 9.8, 0.86), (0.5, 1.86, 0.85), (1.0, 0.86, 0.81)],
    )
    def test_the_grpo_score_multiplies_the_gradient_of_small_proxies(self, spread, ratio, cosine):
        """The table of docs/method.md, of these random numbers."""
        generator = torch.Generator().manual_seed(0)
        rates = torch.rand(256, 1, generator=generator, dtype=torch.float64)
        labels = (torch.rand(256, 8, generator=generator, dtype=torch.float64) < rates).double().view(-1)
        proxies = spread * torch.randn(256 * 8, generator=generator, dtype=torch.float64)
        grpo, rloo = (
            proxy_coefficients(proxies, labels, num_generations=8, score_estimator=name) for name in ("grpo", "rloo")
        )
        assert (grpo.norm() / rloo.norm()).item() == pytest.approx(ratio, rel=0.04)
        assert (grpo @ rloo / grpo.norm() / rloo.norm()).item() == pytest.approx(cosine, abs=0.01)

    def test_rloo_is_a_rescaled_dr_grpo(self):
        proxies, labels = random_case(4, unlabelled=False)
        rloo, dr_grpo = (
            group_scores(proxies, labels, num_generations=6, score_estimator=e) for e in ("rloo", "dr_grpo")
        )
        torch.testing.assert_close(rloo, 6 / 5 * dr_grpo, rtol=1e-14, atol=1e-14)

    def test_unweighted_rloo_at_proxy_zero_is_the_rloo_policy_gradient(self):
        _, labels = random_case(5, unlabelled=False)
        coefficients = proxy_coefficients(torch.zeros(30), labels, num_generations=6, class_weighting="none")
        rewards = labels.view(-1, 6)
        advantage = rewards - (rewards.sum(1, keepdim=True) - rewards) / 5
        # about 10 roundings: the sum of six, the mean, the difference, the factors; magnitudes add up to at most 6/5
        atol = rounding_atol(10, 6 / 5)
        torch.testing.assert_close(-30 * coefficients.double(), advantage.view(-1), rtol=0.0, atol=atol)

    def test_balanced_groups_have_equal_say_whatever_their_success_rate(self):
        # total |gradient| of a mixed group at proxy 0 is G^2 / (2 (G - 1)) / N
        for num_correct in range(1, 8):
            labels = torch.tensor([1.0] * num_correct + [0.0] * (8 - num_correct), dtype=torch.float64)
            coefficients = proxy_coefficients(zeros(8), labels, num_generations=8)
            total = 64 / 14 / 8
            assert coefficients.abs().sum().item() == pytest.approx(total, abs=rounding_atol(1, total))  # the weights

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_the_better_of_two_completions_is_never_pushed_down_more_at_proxy_zero(self, estimator, weighting):
        generator = torch.Generator().manual_seed(shifted(7))
        exponents = torch.tensor([[0.1], [1.0], [4.0], [12.0]], dtype=torch.float64)  # group means 0.9 to 0.08
        groups = [torch.rand(4, 6, generator=generator, dtype=torch.float64) ** exponents for _ in range(20)]
        for labels in [*torch.cat(groups), double([0.0, 0.05, 0.1, 0.2]), double([0.0, 1e-30, 1e-8, 0.5])]:
            labels = labels.sort().values
            push = -proxy_coefficients(zeros(len(labels)), labels, **kinds(estimator, weighting, len(labels)))
            assert (push.diff() >= -1e-8).all(), (labels, push)  # weights are rounded to float32
            assert push[-1] - push[0] > 0.1 * (labels[-1] - labels[0]) / len(labels), (labels, push)

    def test_soft_labels_below_a_mean_of_one_quarter_have_the_coefficients_worked_by_hand(self):
        # sum R = 0.35, sum (1 - R) = 3.65, n = 4: p = R * 40/7, q = (1 - R) * 40/73; e = (q - p) / 2, c = 4/3 * (e -
        # mean)
        labels = double([0.0, 0.05, 0.1, 0.2])
        e = [((1 - r) * 40 / 73 - r * 40 / 7) / 2 for r in labels.tolist()]
        expected = double([4 / 3 * x for x in e])  # the mean of e is 0: both halves sum to n / 2
        coefficients = proxy_coefficients(zeros(4), labels, num_generations=4)
        torch.testing.assert_close(4 * coefficients, expected, rtol=0, atol=1e-7)

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    def test_the_actor_term_weighs_the_two_halves_too(self, weighting):
        scores, labels = double([0.5, -1.0, 2.0]), double([0.1, 0.3, 0.2])
        n_pos, n_neg = 0.6, 2.4
        up, down = {
            "balanced": (1.5 / n_pos, 1.5 / n_neg),
            "none": (1.0, 1.0),
            "only_positive": (1.0, 0.0),
            "only_negative": (0.0, 1.0),
        }[weighting]
        ell = up * labels * torch.sigmoid(scores).log() + down * (1 - labels) * torch.sigmoid(-scores).log()
        expected = -(ell - (ell.sum() - ell) / 2) / 3
        coefficients = actor_coefficients(scores, labels, num_generations=3, class_weighting=weighting)
        torch.testing.assert_close(coefficients, expected, rtol=0, atol=1e-7)  # weights are rounded to float32

    def test_flipping_labels_flips_the_gradient_at_proxy_zero(self):
        _, labels = random_case(6, unlabelled=False)
        flipped = proxy_coefficients(zeros(30), 1 - labels, num_generations=6)
        torch.testing.assert_close(proxy_coefficients(zeros(30), labels, num_generations=6), -flipped)

    @pytest.mark.parametrize("size", [2, 3, 6, 8])
    def test_actor_coefficients_vanish_in_a_uniform_group(self, size):
        assert (actor_coefficients(torch.zeros(size), torch.ones(size), num_generations=size) == 0).all()


class TestEquationFive:
    """Eq. 5 by enumeration: a categorical policy over three outcomes, every group of two, score without baseline."""

    beta = 0.7
    outcome_labels = double([1.0, 0.0, 0.0])

    def setup_method(self):
        self.theta = double([0.3, -0.4, 0.1]).requires_grad_()
        self.ref_logp = torch.log_softmax(double([-0.2, 0.5, 0.0]), 0)

    def ell(self, logp):
        psi = self.beta * (logp - self.ref_logp)
        return self.outcome_labels * torch.log(torch.sigmoid(psi)) + (1 - self.outcome_labels) * torch.log(
            1 - torch.sigmoid(psi)
        )

    def estimate(self, actor_term_coef):
        """Expected gradient of the sampled estimator, over all groups of two with their probabilities."""
        logp = torch.log_softmax(self.theta, 0)
        total = torch.zeros(3, dtype=torch.float64)
        for group in itertools.product(range(3), repeat=2):
            rows = torch.tensor(group)
            labels = self.outcome_labels[rows]
            proxies = self.beta * (logp - self.ref_logp)[rows].detach()
            factors = self.beta * proxy_coefficients(proxies, labels, **kinds("none", "none", 2))
            actor = actor_coefficients(proxies, labels, num_generations=2, class_weighting="none")
            factors = factors + actor_term_coef * actor
            (gradient,) = torch.autograd.grad((factors * logp[rows]).sum(), self.theta, retain_graph=True)
            total += logp[rows].detach().sum().exp() * gradient
        return total

    def test_it_is_the_gradient_of_the_expected_loss_and_without_actor_term_of_its_critic_term(self):
        logp = torch.log_softmax(self.theta, 0)
        expected_loss = -(logp.exp() * self.ell(logp)).sum()  # eq. 1
        critic_only = -(logp.exp().detach() * self.ell(logp)).sum()  # probabilities held fixed
        for coefficient, loss in ((1.0, expected_loss), (0.0, critic_only)):
            (expected,) = torch.autograd.grad(loss, self.theta, retain_graph=True)
            torch.testing.assert_close(self.estimate(coefficient), expected, rtol=1e-12, atol=1e-12)
        assert (self.estimate(1.0) - expected).abs().max() > 1e-2  # the two are different things
