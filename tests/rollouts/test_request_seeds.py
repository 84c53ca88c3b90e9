"""Seeds of vLLM requests do not depend on the number of engines that generate a batch."""

import numpy as np

from pacs_trl.rollouts.request_seeds import RequestSeeds, request_seed


PROMPTS = [[1, 2], [1, 2], [1, 2], [3], [3], [3], [4, 4], [4, 4], [4, 4], [5], [5], [5]]
COMPLETIONS = [[10 + i] for i in range(12)]
# completions that called a tool, and the tokens of its result
CALLED = {1: [90], 2: [91], 5: [92], 7: [93], 8: [94]}


def seeds_of_batch(num_engines: int, batch: int) -> dict[tuple[int, int], int]:
    """Seeds by turn and completion."""
    seeds, size = {}, len(PROMPTS) // num_engines
    for engine in range(num_engines):
        rows = range(engine * size, (engine + 1) * size)
        source = RequestSeeds(42, engine)
        source.begin_batch(batch, first=rows[0])
        seeds |= dict(zip([(0, i) for i in rows], source.next([PROMPTS[i] for i in rows]), strict=True))
        source.record([COMPLETIONS[i] for i in rows])
        called = [i for i in rows if i in CALLED]
        texts = [PROMPTS[i] + COMPLETIONS[i] + CALLED[i] for i in called]
        if called:
            seeds |= dict(zip([(1, i) for i in called], source.next(texts), strict=True))
    return seeds


def test_seeds_do_not_depend_on_the_number_of_engines():
    seeds = seeds_of_batch(1, batch=3)
    assert len(set(seeds.values())) == 12 + 5
    assert seeds == seeds_of_batch(2, batch=3) == seeds_of_batch(4, batch=3) == seeds_of_batch(6, batch=3)
    assert not set(seeds.values()) & set(seeds_of_batch(1, batch=4).values())
    assert seeds[0, 0] == request_seed("42/3/1", 0) and seeds[1, 5] == request_seed("42/3/2", 5)


def test_a_rollout_function_that_asks_for_each_completion_again_or_for_some():
    source = RequestSeeds(42, engine=1)
    source.begin_batch(0, first=2)
    first = source.next([[1], [2]])
    source.record([[5], [6]])
    again = source.next([[7], [8]])
    assert first == [request_seed("42/0/1", i) for i in (2, 3)]
    assert again == [request_seed("42/0/2", i) for i in (2, 3)]
    some = source.next([np.array([9]).tolist()])
    assert not {*some} & {*first, *again}
