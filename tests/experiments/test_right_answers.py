"""Problems with many correct answers: their answers, the exact measurements, and the analysis of made-up records."""

import json
import math
import random
import re

import pytest
import torch
from support.models import TOKENIZER, tiny_model
from support.rollouts import Replay
from support.runs import build_trainer, spy_on
from support.seeds import shifted

from experiments.right_answers.analysis import all_tables, draw, lost_and_gained, pass_at, task_tables
from experiments.right_answers.gated import GatedGRPOTrainer, GatedREINFORCETrainer, expected_gains
from experiments.right_answers.runs import (
    ARMS,
    LEADING_ARMS,
    PILOT_SEED,
    RATES,
    RECORDS,
    SEEDS,
    Run,
    answer_logps,
    at_level,
    best_rate,
    long_plan,
    measure,
    plan,
)
from experiments.right_answers.tasks import HELD_OUT, TASKS, Problem, reward, split


PAGE = RECORDS.parent / "README.md"


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_always_the_same_distinct_and_held_out(task):
    train, held_out = split(task)
    assert split(task) == (train, held_out) and len(held_out) == HELD_OUT < len(train)
    assert len({problem.prompt for problem in [*train, *held_out]}) == len(train) + HELD_OUT
    assert all(len(set(problem.answers)) == len(problem.answers) > 1 for problem in [*train, *held_out])


def test_listed_answers_are_the_correct_ones():
    for prompt, answers in split("between")[0]:
        low, high = map(int, prompt.splitlines()[1].strip(": ").split(" to "))
        assert set(answers) == {str(n) for n in range(100) if low < n < high}
    for prompt, answers in split("divisors")[0]:
        number = int(prompt.split()[-1].strip(":"))
        assert set(answers) == {str(n) for n in range(1, 100) if number % n == 0} - {"1", str(number)}
    for prompt, answers in split("multiples")[0]:
        number = int(prompt.split()[-1].strip(":"))
        assert set(answers) == {str(n) for n in range(number + 1, 200) if n % number == 0}


def test_a_reward_is_1_for_an_answer_with_the_end_of_its_line_alone():
    texts = ["35\n", "35", " 35\n", "35\n3", "36\n", ""]
    assert reward(texts, [["35", "34"]] * 6) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_measurements_on_paper():
    # Two correct answers of probability 1/4 each, before training 3/8 and 1/8: q = 1/2, 1/2 against 3/4, 1/4.
    now, first = torch.tensor([0.25, 0.25]).double().log(), torch.tensor([0.375, 0.125]).double().log()
    metrics = measure([now], [first])
    assert metrics["pass@1"] == 0.5 and metrics["pass@8"] == pytest.approx(1 - 0.5**8, abs=1e-5)
    assert metrics["distinct"] == pytest.approx(2 * (1 - 0.75**64), abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(2.0)
    assert metrics["kl"] == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-5)
    assert measure([first], [first])["kl"] == 0


def test_gates_equal_integrals_over_the_posterior():
    p = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for size, k in ((4, 2), (8, 64)):
        gains = expected_gains(size, k)
        for m in range(size + 1):
            density = p**m * (1 - p) ** (size - m)
            integral = (density / density.sum() * k * (1 - p) ** (k - 1)).sum()
            assert gains[m].item() == pytest.approx(integral.item(), rel=1e-4)
        assert (gains.diff() < 0).all()  # the more is solved, the less there is to gain


def test_gates_multiply_the_advantages_of_groups_by_their_number_of_correct_completions(tmp_path):
    replay = Replay(num_generations=8, uniform_groups=0)
    settings = {"num_generations": 8, "per_device_train_batch_size": 32, "max_steps": 1, "gate_k": 4}
    trainer, seen = build_trainer(tmp_path, replay=replay, trainer_class=GatedGRPOTrainer, **settings), []
    spy_on(trainer, "advantages", lambda result, batch, *_: seen.append((result, dict(batch))))
    trainer.train()
    ((advantages, batch),) = seen
    numbers = batch["labels"].view(-1, 8).sum(dim=1)
    assert len(numbers.unique()) > 1
    for number, before, after in zip(numbers, batch["advantages"].view(-1, 8), advantages.view(-1, 8), strict=True):
        # E[4 (1 - p)^3] is proportional to (n - m + 1) (n - m + 2) (n - m + 3)
        wrong = 8 - int(number)
        weight = (wrong + 1) * (wrong + 2) * (wrong + 3) / (8 * 9 * 10)
        torch.testing.assert_close(after, weight * before.double(), rtol=1e-5, atol=1e-7)


def test_gated_reinforce_learns_from_groups_without_a_correct_completion(tmp_path):
    replay = Replay(num_generations=4, uniform_groups=2)
    settings = {"num_generations": 4, "per_device_train_batch_size": 32, "max_steps": 1, "gate_k": 4}
    settings["gate_threshold"] = 0.1
    trainer, seen = build_trainer(tmp_path, replay=replay, trainer_class=GatedREINFORCETrainer, **settings), []
    spy_on(trainer, "advantages", lambda result, batch, *_: seen.append((result, dict(batch))))
    trainer.train()
    ((advantages, batch),) = seen
    # E[4 (1 - p)^3] / 5 = 4 B(m + 1, 8 - m) / (5 B(m + 1, 5 - m)), 1/2, 2/7, 1/7, 2/35, 1/70 for m = 0 to 4
    shares = {0: 1 / 2, 1: 2 / 7, 2: 1 / 7, 3: 0.0, 4: 0.0}
    labels = batch["labels"].view(-1, 4)
    assert 0 in labels.sum(dim=1) and len(labels.sum(dim=1).unique()) > 2
    for row, actual in zip(labels.tolist(), advantages.view(-1, 4).tolist(), strict=True):
        share = shares[int(sum(row))]
        assert actual == pytest.approx([share if label else -share for label in row])


def points(*pass_1, distinct=8.0, slope=-4.0):
    return [
        {"update": 20 * i, "pass@1": p, "pass@8": p, "pass@64": 1.0, "distinct": distinct + slope * p, "kl": p}
        for i, p in enumerate(pass_1)
    ]


def test_metrics_at_the_first_crossing_are_linear_in_pass_1():
    point = at_level(points(0.1, 0.4, 0.8, 0.3, 0.9), 0.5)
    assert point["update"] == pytest.approx(25.0) and point["pass@1"] == pytest.approx(0.5)
    assert point["distinct"] == pytest.approx(6.0)
    assert at_level(points(0.1, 0.4), 0.5) is None and at_level(points(0.6, 0.7), 0.5) is None


def test_a_problem_is_lost_that_64_samples_no_longer_solve():
    # 1 - (1 - p)^64 is at least one half from p = 0.0108
    assert lost_and_gained([0.5, 0.5, 0.0, 0.0], [0.4, 0.010, 0.011, 0.001]) == (0.25, 0.25)


def test_pass_at_k_from_success_rates_by_hand():
    assert pass_at(2, [0.5, 0.0]) == (0.75 + 0.0) / 2 and pass_at(128, [1.0000001]) == 1


def record(arm, seed, rate=1e-5, **changes):
    run = Run("between", arm, rate, seed)
    values = {"updates": 40, "before": [0.1], "after": [0.2], "entropy": [1.0], "cpu_seconds": 80.0}
    return {**run._asdict(), **values, "points": points(0.1, 0.4, 0.8), **changes}


def test_tables_pair_seeds_and_cover_known_differences(tmp_path):
    generator = random.Random(shifted(0))
    records = []
    for seed in SEEDS:
        common = generator.gauss(0, 3)  # cancels in the difference of a pair
        for arm, gain in (("GRPO", 0.0), ("PACS, rollout", 0.0), ("PACS, kept, beta 0.1", 2.0)):
            records.append(record(arm, seed, points=points(0.1, 0.4, 0.8, distinct=8 + common + gain)))
    records.pop()  # pairs are those of common seeds
    lines = task_tables("between", records, 0.5)
    (row,) = [line for line in lines if line.startswith("| PACS, kept") and " of " in line]
    assert "| 4 of 4 |" in row and "| 40 to 80 |" in row and row.endswith("| +2.00 ± 0.00 |")
    (row,) = [line for line in lines if line.startswith("| PACS, kept, beta 0.1 − PACS, rollout |")]
    assert row.split("|")[2:5] == [" +2.00 ± 0.00 ", " +0.0 ± 0.0 ", " +2.00 ± 0.00 "]
    draw(records, LEADING_ARMS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert "No run" in "\n".join(task_tables("between", [record("GRPO", PILOT_SEED)], 0.5))


def test_the_tables_of_the_page_are_those_of_the_records():
    rows = [
        line for line in PAGE.read_text().splitlines() if re.match(rf"\| ({'|'.join(map(re.escape, ARMS))}) ", line)
    ]
    assert len(rows) > 20 and set(rows) <= set(all_tables())


def test_the_plan_waits_for_the_pilot_and_takes_its_best_rate():
    runs = plan([])
    assert {run.seed for run in runs} == {PILOT_SEED} and runs[0].arm == LEADING_ARMS[0]
    distinct = dict(zip(RATES, (5.0, 9.0, 7.0), strict=True))
    records = [
        record("GRPO", PILOT_SEED, rate, points=points(0.1, 0.6, distinct=number)) for rate, number in distinct.items()
    ]
    chosen = [run for run in plan(records) if run.seed != PILOT_SEED]
    assert chosen == [Run("between", "GRPO", RATES[1], seed) for seed in SEEDS]
    slow = [record("GRPO", PILOT_SEED, rate, points=points(0.1, 100 * rate**0.5)) for rate in RATES]
    assert best_rate(slow, "between", "GRPO") == max(RATES)  # none reaches the level
    assert len({run.file for run in plan(records)}) == len(plan(records))
    assert set(LEADING_ARMS) <= set(ARMS) and json.loads(json.dumps(records)) == records


def test_long_runs_differ_only_in_arm_and_seed():
    runs = long_plan([3, 4])
    assert {run.rate for run in runs} == {min(RATES)}
    every = {(task, arm, seed) for task in ("sums", "multiples") for arm in ARMS for seed in (3, 4)}
    assert {(run.task, run.arm, run.seed) for run in runs} == every and len(runs) == len(every)
    only_long = {"PACS, kept, beta 1", "REINFORCE, gated"}
    assert {run.arm for run in plan([])} == set(ARMS) - only_long


def test_exact_log_probs_equal_those_of_whole_sequences():
    model, problem = tiny_model().eval(), Problem("20 to 30: ", ("7", "24", "131"))
    actual = answer_logps(model, TOKENIZER, problem)
    prompt = TOKENIZER(problem.prompt)["input_ids"]
    for value, answer in zip(actual.tolist(), problem.answers, strict=True):
        ids = prompt + TOKENIZER(answer)["input_ids"] + [TOKENIZER.eos_token_id]
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=1)
        expected = sum(logps[i - 1, ids[i]].item() for i in range(len(prompt), len(ids)))
        assert value == pytest.approx(expected, abs=1e-4)
