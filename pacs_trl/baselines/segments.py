"""Where a completion is cut so that a generative critic is asked once per segment, not once per token. Pure functions.

A segment ends with a token that the policy was unsure of (GenAC, arXiv 2604.10701), after so many
tokens, or with the last one. The value of a segment is asked for on the prefix *before its first token*: a prefix that
held an action of the segment would tell the critic what its value is to be subtracted from.

Positions count the tokens that the policy wrote: results of tools stand in a prefix, and are no actions.
"""

from collections.abc import Sequence

import torch


def segment_starts(
    probabilities: Sequence[float], *, threshold: float | None, length: int | None, most: int
) -> list[int]:
    """
    The first token of each segment of a completion.

    Args:
        probabilities (sequence of `T` `float`): Of the tokens under the policy that drew them.
        threshold (`float`, *optional*): A token below it ends its segment.
        length (`int`, *optional*): So does every token whose number is a multiple of this.
        most (`int`): Segments at most. Of more ends, every so many-th is kept, and the last token.

    Returns:
        `list[int]`: rising, the first one 0; empty for an empty completion.
    """
    number = len(probabilities)
    ends = [
        t
        for t, probability in enumerate(probabilities)
        if (threshold is not None and probability < threshold)
        or (length is not None and (t + 1) % length == 0)
        or t == number - 1
    ]
    kept = min(most, len(ends))
    ends = [ends[(i + 1) * len(ends) // kept - 1] for i in range(kept)]
    return [0, *(end + 1 for end in ends[:-1])] if ends else []


def of_tokens(values: Sequence[float], starts: Sequence[int], num_tokens: int) -> torch.Tensor:
    """`(T,)`: of each token the value of its segment."""
    lengths = [end - start for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)]
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def border_lambdas(starts: Sequence[int], num_tokens: int, gae_lambda: float) -> torch.Tensor:
    """`(T,)`: the lambda between each token and the next for [`~gae.generalized_advantages`], which is 1 inside a
    segment: nothing is estimated there, and a discount per token would forget the reward of long completions."""
    lambdas = torch.ones(num_tokens)
    lambdas[[start - 1 for start in starts[1:]]] = gae_lambda
    return lambdas
