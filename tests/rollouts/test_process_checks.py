"""The digest of a training set, by which processes and resumed runs compare their prompts."""

import pytest
from datasets import Dataset, Features, Image, Value

from pacs_trl.rollouts.process_checks import prompt_digest


TEXTS = Dataset.from_dict({"prompt": ["1 + 1?", "2 + 2?"], "solution": ["2", "4"]})
IMAGE_THAT_CANNOT_BE_READ = {"bytes": b"no image", "path": None}


def test_the_digest_stays_the_same_in_later_versions():
    assert prompt_digest(TEXTS) == "5a9b3e4b73ac2b08bb3b1b4ddfd7cd0349d95a4cc066e4ebe7a03768ec46c405"


@pytest.mark.parametrize("dataset_format", ["numpy", "pandas", "arrow", "torch"])
def test_the_digest_does_not_depend_on_the_format_of_the_dataset(dataset_format):
    assert prompt_digest(TEXTS.with_format(dataset_format)) == prompt_digest(TEXTS)


def test_the_digest_does_not_depend_on_absent_keys_of_messages_or_their_order():
    message = {"role": "user", "content": "1 + 1?"}
    with_absent_key = {"name": None, "content": "1 + 1?", "role": "user"}
    digests = {prompt_digest(Dataset.from_list([{"prompt": [each]}])) for each in (message, with_absent_key)}
    assert len(digests) == 1


def test_the_digest_depends_on_the_prompts_and_their_order_and_not_on_other_columns():
    assert prompt_digest(TEXTS.select([1, 0])) != prompt_digest(TEXTS)
    assert prompt_digest(TEXTS.select([0])) != prompt_digest(TEXTS)
    assert prompt_digest(TEXTS.remove_columns("solution")) == prompt_digest(TEXTS)


def test_rows_without_prompts_are_compared_without_reading_their_images():
    def rows(*levels):
        columns = {"level": [*levels], "image": [IMAGE_THAT_CANNOT_BE_READ] * len(levels)}
        return Dataset.from_dict(columns, features=Features({"level": Value("int64"), "image": Image()}))

    assert prompt_digest(rows(1, 2)) == prompt_digest(rows(1, 2)) != prompt_digest(rows(2, 1))
