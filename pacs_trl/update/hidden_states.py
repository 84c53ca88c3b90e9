"""How many directions the hidden states of a completion span, how fast that grows, and VERL, which weighs completions by it.

VERL ([arXiv 2509.23808](https://huggingface.co/papers/2509.23808)) takes the effective rank of a completion for exploration, and its
first and second differences over the tokens for exploitation. The formulas are the paper's; the flags of the authors' launch script
(github.com/hf618/VERL, 3de68f1) switch the bonus off.

Cost: one Gram matrix `(n, n)` of at most 512 tokens, of which every prefix has a block, and its eigenvalues, `n^3` for each prefix; for
the effective rank of a whole completion of `T` tokens and width `D` the eigenvalues of the smaller Gram matrix, `min(T, D)^3`.

Letters for shapes: `T` tokens of a completion, `D` width of the model, `B` completions.
"""

import math

import torch


# As in the authors' code.
_EPSILON = 1e-8
LONGEST_PREFIX = 512  # velocity and acceleration look at so many tokens, the last ones
_DECAY = 0.3  # of the running means: the weight of the newest step
_GAIN = 2.0
_MOST_DEVIATION = 5.0
_MOST_SHARE = 0.5  # of an advantage that may be added to it


def effective_rank(hidden_states: torch.Tensor) -> float:
    """
    `exp(-sum p log p)` of the singular values, divided by their sum, of hidden states whose mean is taken off.

    Args:
        hidden_states (`torch.Tensor` of shape `(T, D)`): Of the tokens of one completion.

    Returns:
        `float`: from 1 (one direction, one token or none) to `min(T - 1, D)`.
    """
    states = hidden_states.double()
    if len(states) < 2:
        return 1.0
    states = states - states.mean(dim=0)
    return _rank_of_gram(states @ states.T if len(states) <= states.shape[1] else states.T @ states)


def _rank_of_gram(gram: torch.Tensor) -> float:
    """Of the matrix of inner products, in float64: its eigenvalues are squares of singular values."""
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    shares = values / (values.sum() + _EPSILON)
    return math.exp(-(shares * (shares + _EPSILON).log()).sum().item())


def rank_velocity_and_acceleration(hidden_states: torch.Tensor, stride: int) -> tuple[float, float]:
    """
    How the effective rank grows over a completion: with the ranks `E_1, E_2, ...` of the prefixes of `stride + 1`, `2 stride + 1`,
    ... tokens and `d_j = E_j - mean(E_1, ..., E_(j-1))`, the mean of `d_j`, and the mean of `d_j - d_(j-1)`.

    Args:
        hidden_states (`torch.Tensor` of shape `(T, D)`): Of the tokens of one completion; the last 512 are looked at.
        stride (`int`): Tokens between prefixes.

    Returns:
        Velocity and acceleration; 0 where there are too few prefixes (two, and three).

    Raises:
        `ValueError`: if `stride` is below 1.
    """
    if stride < 1:
        raise ValueError(f"`stride` must be at least 1, got {stride}: it counts the tokens between two prefixes.")
    states = hidden_states[-LONGEST_PREFIX:].double()
    gram = states @ states.T
    ranks = []
    for n in range(stride + 1, len(states) + 1, stride):
        block = gram[:n, :n]
        row_means = block.mean(dim=0)
        ranks.append(_rank_of_gram(block - row_means - row_means[:, None] + row_means.mean()))
    differences = [rank - sum(ranks[:j]) / j for j, rank in enumerate(ranks) if j > 0]
    second = [later - earlier for earlier, later in zip(differences, differences[1:], strict=False)]
    return sum(differences) / max(len(differences), 1), sum(second) / max(len(second), 1)


class Verl:
    """
    VERL's bonus on the advantages of completions; its running means are the state of a run.

    With `dev(x) = clip((x - m) / |m|, -5, 5)` against the running mean `m` of each metric, `t = sigmoid(2 dev(acceleration))` and
    `Phi = t tanh(dev(rank)) + (1 - t) tanh(dev(velocity))`, an advantage `A` becomes `A + min(relu(Phi), |A| / 2)`.

    Args:
        on_last_token (`bool`): Whether the update gives the bonus to the last counted token of a completion, as the authors do, or to
            all of them.

    Attributes:
        means (list of 3 `float`, *optional*): Of effective rank, velocity and acceleration, over the steps so far; `None` before the
            first. The authors begin at 0, where every deviation is cut off.
    """

    def __init__(self, on_last_token: bool = False):
        self.on_last_token = on_last_token
        self.means: list[float] | None = None

    def shaped(self, coefficients: torch.Tensor, ranks: torch.Tensor, num_rows: int) -> torch.Tensor:
        """
        The coefficients of a step, and its part in the means of later ones.

        Args:
            coefficients (`torch.Tensor` of shape `(B,)`): `c`; rows at 0 do not count, and stay there.
            ranks (`torch.Tensor` of shape `(3, B)`): Effective rank, velocity, acceleration of each row that counts.
            num_rows (`int`): `N`: the advantage of a row is `-N c`.

        Returns:
            `torch.Tensor` of shape `(B,)`: between 1 and 1.5 times a coefficient below 0, 1/2 and 1 times one above.
        """
        counts = coefficients != 0
        if not counts.any():
            return coefficients
        of_step = ranks[:, counts].double().mean(dim=1)
        means = of_step if self.means is None else torch.tensor(self.means, dtype=torch.float64)
        deviations = (ranks - means[:, None]) / (means[:, None].abs() + _EPSILON)
        rank, velocity, acceleration = deviations.clamp(-_MOST_DEVIATION, _MOST_DEVIATION)
        balance = torch.sigmoid(_GAIN * acceleration)
        phi = balance * rank.tanh() + (1 - balance) * velocity.tanh()
        self.means = ((1 - _DECAY) * means + _DECAY * of_step).tolist()
        advantages = -num_rows * coefficients
        bonus = torch.minimum(phi.clamp(min=0).to(advantages), _MOST_SHARE * advantages.abs())
        return torch.where(counts, -(advantages + bonus) / num_rows, coefficients)
