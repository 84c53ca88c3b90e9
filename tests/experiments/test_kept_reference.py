"""The tables of docs/results/reference: exact expectations over groups, power laws, and sampled groups."""

import pytest
import torch

from experiments.reference import arms, decay, exact, ratio_and_entropy, simulate


@pytest.mark.parametrize(
    ("settings", "ratio", "entropy"),
    [
        ({}, 12.24, 0.305),
        ({"reset": 80}, 158.5, 0.0475),
        ({"reset": 4}, 782.9, 0.0174),
        ({"beta": 0.0}, 825.5, 0.0168),
    ],
)
def test_only_a_kept_reference_preserves_the_ratio_of_correct_answers(settings, ratio, entropy):
    """The optimum of appendix A.2 has the reference's ratio, 12."""
    assert ratio_and_entropy(exact(**settings)[-1]) == pytest.approx((ratio, entropy), rel=2e-2)


@pytest.mark.parametrize(("beta", "size"), [(0.0, 2), (1.0, 2), (3.0, 3)])
def test_incorrect_answers_disappear_by_the_predicted_power_law(beta, size):
    path = exact(beta=beta, num_generations=size, num_updates=2000)
    assert decay(path, 2000) == pytest.approx(-1 / (1 + beta / (size - 1)), rel=0.1)


def test_the_simulation_agrees():
    """PACS with the generating policy as reference and no class weights is RLOO; a kept reference preserves ratios."""
    found = {name: simulate(**arms()[name], runs=2) for name in ("PACS, rollout, beta 1, no class weights", "RLOO")}
    for mine, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)
    kept = simulate(**arms()["PACS, kept, beta 1, no class weights"], runs=2)
    assert kept[2].max() < found["RLOO"][2].min() / 10
