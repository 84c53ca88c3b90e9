import pytest
from support.models import TOKENIZER
from support.optional_packages import reasoning_gym  # noqa: F401 (skips without it)

from pacs_trl.data import DataArguments, load_training_data
from pacs_trl.evaluation.benchmarks import load_benchmark


SUMS = {"chain_sum": {"config": {"min_terms": 2, "max_terms": 2}}}


def test_training_problems_are_those_of_the_seed():
    args = DataArguments("reasoning_gym", reasoning_gym=SUMS | {"leg_counting": None}, dataset_size=10, dataset_seed=7)
    train, _ = load_training_data(args, TOKENIZER)
    entries = list(reasoning_gym.create_dataset("chain_sum", seed=7, size=5, min_terms=2, max_terms=2))
    prompts = {row["prompt"][-1]["content"] for row in train if row["task"] == "chain_sum"}
    assert prompts == {f"{entry['question']} Reply with the answer only." for entry in entries}
    assert sorted(train["task"]) == ["chain_sum"] * 5 + ["leg_counting"] * 5


def test_benchmark_has_seeds_of_its_own():
    loaded = load_benchmark("reasoning_gym/chain_sum", max_problems=3, gym_tasks=SUMS)
    entries = reasoning_gym.create_dataset("chain_sum", seed=1_000_000, size=3, min_terms=2, max_terms=2)
    assert [problem.problem for problem in loaded.problems] == [entry["question"] for entry in entries]
    numbers = load_benchmark("reasoning_gym/chain_sum", gym_tasks={"chain_sum": {"answer": "last_number"}})
    assert numbers.source["answer"] == "last_number" and '"last_number"' in numbers.problems[0].solution
    assert loaded.source["config"] == SUMS["chain_sum"]["config"] and not loaded.is_code
    with pytest.raises(ValueError, match="1000"):
        load_benchmark("reasoning_gym/chain_sum", max_problems=1001)


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ({"chain_sums": None}, "chain_sums.*`chain_sum`"),
        ({"chain_sum": {"config": {"max_term": 2}}}, "max_term"),
        ({"chain_sum": {"config": {"max_terms": 1}}}, "max_terms must be >= min_terms"),
        ({"chain_sum": {"weights": 2}}, "weights"),
        ({"chain_sum": {"answer": "last"}}, "answer: last_number"),
        ({"chain_sum": 3}, "chain_sum has 3"),
        ({"chain_sum": {"weight": 0}}, "weight, above 0"),
        ({"chain_sum": {"config": [2]}}, "config, a mapping"),
    ],
)
def test_unknown_tasks_and_keys_are_refused(tasks, named):
    with pytest.raises(ValueError, match=named):
        load_training_data(DataArguments("reasoning_gym", reasoning_gym=tasks), TOKENIZER)
