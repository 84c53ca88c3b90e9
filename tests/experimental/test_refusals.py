"""Input that related methods refuse before the model is loaded."""

import pytest
from datasets import Dataset
from support.rollouts import addition_dataset, digit_reward
from support.runs import build_trainer

from pacs_trl.experimental.dars import DARSTrainer
from pacs_trl.experimental.guidance import GuidanceTrainer
from pacs_trl.experimental.rlpr import RLPRTrainer, probability_reward
from pacs_trl.rewards import run_python


class Environment:
    def reset(self, **kwargs) -> None:
        """Start."""


def streamed() -> dict:
    return {"train_dataset": addition_dataset().to_iterable_dataset()}


HINTS, FEEDBACK = ({"trainer_class": GuidanceTrainer, "guidance": guidance} for guidance in ("hint", "feedback"))
TEXTS = addition_dataset(8).map(lambda row: {"prompt": row["solution"]}, remove_columns="prompt")
NO_USER = addition_dataset(8).map(lambda row, i: {"hint": "h" * (i == 5)}, with_indices=True)
NO_USER = NO_USER.map(lambda row: {"prompt": [{"role": "system", "content": row["solution"]}]})
REFILL = {"trainer_class": DARSTrainer, "refill_uniform_groups": True}
RLPR = {"trainer_class": RLPRTrainer, "reward": [digit_reward, probability_reward]}
BLANK = addition_dataset().map(lambda row, i: {"solution": " " * (i == 5) or row["solution"]}, with_indices=True)
REFUSED = {
    "refill from a stream": (REFILL | {"more": streamed()}, "refill_uniform_groups"),
    "no hints": (HINTS, "guidance='hint'"),
    "a hint without a user turn": (HINTS | {"more": {"train_dataset": NO_USER}}, "Row 5 of .*no user turn"),
    "guidance in an environment": (HINTS | {"more": {"environment_factory": Environment}}, "environment_factory"),
    "feedback with tools": (FEEDBACK | {"more": {"tools": [run_python]}}, "guidance='feedback'"),
    "feedback on texts": (FEEDBACK | {"more": {"train_dataset": TEXTS}}, "guidance='feedback'"),
    "probabilities with tools": (RLPR | {"more": {"tools": [run_python]}}, "probability_reward"),
    "a reference answer that is blank": (RLPR | {"more": {"train_dataset": BLANK}}, "solution"),
    "no reference answers": (RLPR | {"more": {"train_dataset": BLANK.remove_columns("solution")}}, "solution"),
    "reference answers in a stream": (RLPR | {"more": streamed()}, "solution"),
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_settings_are_refused_before_training(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        build_trainer(tmp_path, **({"model": "no/model"} | settings))


def hinted(prompt: list[dict]) -> Dataset:
    """A dataset whose only stored column is `number`; a transform makes prompts and hints."""

    def transform(batch):
        number = len(batch["number"])
        return {"prompt": [prompt] * number, "hint": ["count"] * number, "solution": ["1"] * number}

    return Dataset.from_dict({"number": list(range(8))}).with_transform(transform)


def test_hints_may_be_made_by_a_transform(tmp_path):
    dataset = hinted([{"role": "user", "content": "1+1="}])
    build_trainer(tmp_path, **HINTS, more={"train_dataset": dataset}).train()


@pytest.mark.parametrize("source", ["transform", "stream"])
def test_hints_that_were_not_checked_before_are_refused_when_they_arrive(tmp_path, source):
    """The message does not give a position in the batch for one in the dataset."""
    dataset = hinted([{"role": "system", "content": "1+1="}])
    if source == "stream":
        dataset = Dataset.from_list(list(dataset)).to_iterable_dataset()
    trainer = build_trainer(tmp_path, **HINTS, more={"train_dataset": dataset})
    with pytest.raises(ValueError, match="An example has the hint 'count', .*no user turn"):
        trainer.train()
