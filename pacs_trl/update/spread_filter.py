"""Groups whose labels lie close together get no verdict: the filter of RLPR, for labels that are never all equal."""

import torch


# As in RLPR: the first steps are not looked at, the mean of the next ones begins the moving average, which then decays so.
_IGNORED, _COLLECTED, _DECAY = 5, 5, 0.99


class SpreadFilter:
    """
    Compares the spread of a group, the standard deviation of its labels, with a moving average over generations.

    Args:
        share (`float`): A group below `share` times the average gets no verdict. RLPR: 0.5 with Qwen, 0.9 with Llama, 1 with Gemma.

    Attributes:
        state (list of `float`): Mean spreads of the generations so far, until the average begins; then only the average, behind the
            number of generations.
    """

    def __init__(self, share: float):
        self.share = share
        self.state: list[float] = [0.0]

    def __call__(self, labels: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, dict[str, float]]:
        """
        Labels with NaN for the rows of groups without spread, and metrics.

        Args:
            labels (`torch.Tensor` of shape `(B,)`): Of a generation on all processes, NaN without a verdict.
            num_generations (`int`): Rows of a group, adjacent.
        """
        grid = labels.view(-1, num_generations).double()
        known = ~grid.isnan()
        count = known.sum(dim=1)
        mean = grid.nansum(dim=1) / count.clamp(min=1)
        squares = ((grid - mean[:, None]) ** 2).nansum(dim=1)
        spreads = (squares / (count - 1).clamp(min=1)).sqrt()  # unbiased
        judged = count >= 2
        number, *means = self.state
        of_step = spreads[judged].mean().item() if judged.any() else None
        active = number >= _IGNORED + _COLLECTED and bool(means)
        bound = self.share * means[0] if active else 0.0
        dropped = judged & (spreads < bound)
        if of_step is not None:
            if active:
                means = [_DECAY * means[0] + (1 - _DECAY) * of_step]
            elif number >= _IGNORED:
                means = [*means, of_step]
        self.state = [number + 1, *means]
        if number + 1 == _IGNORED + _COLLECTED and means:
            self.state = [number + 1, sum(means) / len(means)]
        metrics = {
            "spread_filter/spread": float("nan") if of_step is None else of_step,
            "spread_filter/bound": bound,
            "spread_filter/dropped_fraction": (dropped.sum() / judged.sum().clamp(min=1)).item(),
        }
        return labels.masked_fill(dropped.repeat_interleave(num_generations), torch.nan), metrics
