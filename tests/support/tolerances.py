"""Tolerances for two computations of a number that add and round in another order.

Which order that is depends on the processor, its instruction set and the number of threads, so a tolerance that one
machine meets by luck fails on the next. It follows from the dtype, the number of terms and their size instead.
"""

import math

import torch


def rounding_atol(terms: int, scale: float, dtype: torch.dtype = torch.float32) -> float:
    """
    Largest difference that rounding explains between two sums of the same terms.

    One sum of `n` terms, in any order, is off by at most `n u scale`, where `u = eps / 2` is the error of one rounding
    and `scale` the sum of the magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section
    4.2). Errors of independent roundings cancel in part: `6 sqrt(n) u scale` is exceeded with a probability of `2
    exp(-18)`, 3e-8 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019, theorem 2.4). The smaller of the two counts,
    twice, because both sums are off.

    Args:
        terms (`int`): Additions and other roundings that one number goes through.
        scale (`float`): Sum of the magnitudes of the terms, or a bound on it.
        dtype (`torch.dtype`): What the sums are kept in; float32, or float64 where that is said.
    """
    return 2 * min(terms, 6 * math.sqrt(terms)) * torch.finfo(dtype).eps / 2 * scale
