"""vLLM's engine, stepped by its caller: groups in progress are decoded until a number of them is finished.

Nothing depends on time: requests are added in the order of positions, and the groups that finish first in engine steps
are first. The rest is aborted, and added again later as longer prompts, after weights were replaced for example. A
part of a completion has a seed of its own, so the engine has no state between two calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .request_seeds import request_seed


@dataclass(eq=False)
class GroupInProgress:
    """
    Completions of a prompt, finished or not. Values are plain, so that checkpoints and messages can hold them.

    Attributes:
        position (`int`): Position of the prompt in the order of the run.
        prompt_ids (`list[int]`): Token ids of the prompt.
        completion_ids (`list[list[int]]`): Token ids of each completion, as far as it was decoded.
        logps (`list[list[float]]`): Their log-probs in nats, as the engine has sampled them.
        versions (`list[list[int]]`): Version of the weights that sampled each token.
        ended (`list[bool]`): Whether each completion has its last token.
    """

    position: int
    prompt_ids: list[int]
    completion_ids: list[list[int]]
    logps: list[list[float]]
    versions: list[list[int]]
    ended: list[bool]

    @classmethod
    def start(cls, position: int, prompt_ids: list[int], num_generations: int) -> "GroupInProgress":
        """Return a group without any token."""
        return cls(
            position,
            prompt_ids,
            completion_ids=[[] for _ in range(num_generations)],
            logps=[[] for _ in range(num_generations)],
            versions=[[] for _ in range(num_generations)],
            ended=[False] * num_generations,
        )

    @property
    def is_finished(self) -> bool:
        """Whether all completions have their last tokens."""
        return all(self.ended)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights that sampled a token of the group; `None` if none was sampled."""
        return min((version for versions in self.versions for version in versions), default=None)

    def staleness(self, step: int) -> int:
        """Return the optimizer steps from the oldest weights of the group to the optimizer step `step`."""
        oldest = self.oldest_version
        return 0 if oldest is None else step - oldest


def decode(
    engine: Any,
    groups: Sequence[GroupInProgress],
    num_groups: int,
    version: int,
    stream: str,
    sampling_params: Callable[[int, int], Any],
) -> list[GroupInProgress]:
    """
    Decode `groups`, in place, until `num_groups` of them are finished. Returns these in the order in which they
    finished; of those that finished in one engine step, the one with the lowest position is first.

    Args:
        engine (`vllm.LLMEngine`): Engine without requests, in this process.
        groups (sequence of [`GroupInProgress`]): In the order of positions; at least `num_groups`.
        num_groups (`int`): Number of groups to finish.
        version (`int`): Version of the weights that the engine has.
        stream (`str`): Name of the stream of seeds of this call.
        sampling_params (`Callable`): Returns the `vllm.SamplingParams` of a request for its seed, and the number of
            tokens that the completion has already.
    """
    finished = [group for group in groups if group.is_finished]
    if len(finished) >= num_groups:
        return finished[:num_groups]
    requests: dict[str, tuple[GroupInProgress, int]] = {}
    for group in groups:
        for i, ids in enumerate(group.completion_ids):
            if not group.ended[i]:
                name, seed = f"{group.position}/{i}", request_seed(f"{stream}/{group.position}", i)
                requests[name] = group, i
                prompt = {"prompt_token_ids": [*group.prompt_ids, *ids]}
                engine.add_request(name, prompt, sampling_params(seed, len(ids)))
    while len(finished) < num_groups:
        for output in engine.step():
            group, i = requests[output.request_id]
            (part,) = output.outputs  # the tokens of this step
            group.completion_ids[i] += part.token_ids
            group.logps[i] += [
                candidates[token].logprob for token, candidates in zip(part.token_ids, part.logprobs, strict=True)
            ]
            group.versions[i] += [version] * len(part.token_ids)
            group.ended[i] = output.finished
        finished += [group for group in groups if group.is_finished and group not in finished]
    engine.abort_request([name for name, (group, i) in requests.items() if not group.ended[i]])
    return finished[:num_groups]
