r"""Labels of the steps of sums: a case on paper, and every worked solution."""

import pytest

from experiments.miniature.tasks import demonstrations
from experiments.miniature.tokenizer import build_tokenizer
from experiments.step_reward import step_reward, steps_hold


TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["8+30=38", "38+7=45"], [True, True]),
        (["8+30=39", "39+7=46"], [False, False]),  # what follows from a wrong step is wrong
        (["8+8=16"], [False]),  # there is one 8
        (["9+30=39"], [False]),
        (["8+30=38", "7+38=45"], [True, False]),  # not as it is taught: the running total comes first
        (["8+30=38", "38+8=46"], [True, False]),
        (["", "8+30=38"], [False, False]),
    ],
)
def test_steps_of_a_sum_hold_only_after_correct_ones(steps, expected):
    assert steps_hold("7+30+8", steps) == expected
    assert steps_hold("8+8", ["8+8=16"]) == [True]


def test_pairs_stand_at_the_end_of_steps():
    texts = [r"30+8=38,38+7=\boxed{45}", r"30+8=37,37+7=\boxed{44}", "1,,", r"\boxed{45}"]
    ids = [TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] for text in texts]
    ids[2].pop()  # cut off at a comma
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [[{"role": "user", "content": "7+30+8"}]] * 4
    pairs = step_reward(completions, prompts, ids, solution=["45"] * 4)
    assert pairs == [[(7, 1.0), (17, 1.0)], [(7, 0.0), (17, 0.0)], [(1, 0.0), (2, 0.0)], [(4, 1.0)]]
    assert [ids[0][t] for t, _ in pairs[0]] == [*TOKENIZER(",")["input_ids"], TOKENIZER.eos_token_id]
    unreadable = step_reward(completions, prompts, ids, solution=[None] * 4)
    assert unreadable == [None] * 4


def test_every_worked_solution_holds():
    rows = demonstrations("terms", 200)
    for row in rows:
        *steps, _ = row["solution"].split(",")
        assert all(steps_hold(row["problem"], steps))
