"""Completions of a group start from the same state of their environments: by seeds, or by copies."""

import copy
import dataclasses
import itertools
import random
import tempfile
import threading
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.models import assert_same_models
from support.runs import build_trainer

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import GRPOTrainer, PACSTrainer, RLOOTrainer
from pacs_trl.data.environments import prepare_environments
from pacs_trl.rollouts.environment_state import keeps_state_in_memory
from pacs_trl.rollouts.group_starts import GroupStarts


TOKENIZER = build_tokenizer(tools=True)


class Drawing:
    """Draws a number and tells it."""

    def _draw(self) -> int:
        return random.randint(0, 10**9)

    def reset(self, **columns):
        self.number = self._draw()
        return f"number {self.number}"


class FromSystem(Drawing):
    """Draws from the operating system, which no seed reaches."""

    def _draw(self):
        return random.SystemRandom().randint(0, 10**9)


class Secret(FromSystem):
    def reset(self, **columns):
        super().reset()
        return "guess"


class OwnGenerator(Drawing):
    def __init__(self):
        self.generator = np.random.default_rng()

    def _draw(self):
        return int(self.generator.integers(10**9))


class Corpus(Drawing):
    """Takes the next entry of a corpus that all environments share."""

    entries = itertools.count()

    def _draw(self):
        return next(Corpus.entries)


class WithLock(FromSystem):
    def __init__(self):
        self.lock, self.parent = threading.Lock(), self


class InFolder(Drawing):
    def _draw(self):
        self.folder = tempfile.gettempdir()
        return super()._draw()


class Server:
    """Stands for a client of a server: an object of the module that knows the episodes."""

    def __init__(self):
        self.episodes = {}

    def start(self) -> int:
        self.episodes[len(self.episodes)] = {}
        return len(self.episodes)


SERVER = Server()
SERVER.connection = threading.local  # what it holds is no data
SERVER.send = tempfile.mkdtemp


class OnServer(Drawing):
    def _draw(self):
        return SERVER.start()


class WithoutCopies(FromSystem):
    def reset(self, **columns):
        super().reset()
        self.values = [self.number, (value for value in ())]
        return None


class RefusesCopies(FromSystem):
    def __deepcopy__(self, memo):
        raise TypeError("it is a handle")


def reset_groups(environment_class, rows=({}, {}), seeds=(5, 6)):
    """Reset three environments for each group; their states and observations, by group."""
    starts = GroupStarts()
    create = starts.wrap(environment_class)
    environments = [create() for _ in range(3 * len(rows))]
    starts.begin([i // 3 for i in range(len(environments))], [seeds[i // 3] for i in range(len(environments))])
    observations = [environment.reset(**rows[i // 3]) for i, environment in enumerate(environments)]
    return starts, environments, observations


@pytest.mark.parametrize("environment_class", [Drawing, FromSystem, Secret, OwnGenerator, Corpus, WithLock])
def test_completions_of_a_group_start_from_the_same_state(environment_class):
    starts, environments, observations = reset_groups(environment_class)
    numbers = [environment.number for environment in environments]
    assert numbers[:3] == numbers[:1] * 3 and numbers[3:] == numbers[3:4] * 3
    assert numbers[0] != numbers[3] and not starts.differing
    assert observations[:3] == observations[:1] * 3
    if environment_class is not Secret:
        assert observations == [f"number {number}" for number in numbers]
    if environment_class is OwnGenerator:  # which goes on equally in a group
        assert environments[0]._draw() == environments[1]._draw() != environments[3]._draw()


def test_copies_share_nothing_and_refer_to_themselves():
    class Board(FromSystem):
        def reset(self, **columns):
            super().reset()
            self.rows, self.owner = [[self.number]], [self]

    _, (first, second, *_), _ = reset_groups(Board)
    second.rows[0].append(1)
    assert first.rows == [[first.number]] == [[second.number]] and second.owner == [second]


def test_the_random_numbers_of_the_run_do_not_depend_on_resets():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    reset_groups(Drawing)
    assert random.random() == expected


@pytest.mark.parametrize("environment_class", [InFolder, OnServer])
def test_what_may_keep_its_state_elsewhere_is_not_copied(environment_class):
    """Two environments with one session or folder would play one episode."""
    assert not keeps_state_in_memory(environment_class())
    starts, environments, _ = reset_groups(environment_class)
    assert len({environment.number for environment in environments}) == 6
    assert starts.differing.keys() == {0, 1}


@pytest.mark.parametrize("environment_class", [WithoutCopies, RefusesCopies])
def test_what_cannot_be_copied_is_reported(environment_class):
    starts, environments, _ = reset_groups(environment_class)
    assert len({environment.number for environment in environments}) == 6
    assert "cannot be copied (TypeError" in starts.differing[0]


class Seeded:
    def reset(self, seed, **columns):
        self.seed = seed
        return str(seed)


def test_reset_gets_the_seed_of_its_group_unless_the_dataset_has_one():
    _, environments, _ = reset_groups(Seeded)
    assert [environment.seed for environment in environments] == [5] * 3 + [6] * 3
    _, environments, _ = reset_groups(Seeded, rows=({"seed": 1}, {"seed": 2}))
    assert [environment.seed for environment in environments] == [1] * 3 + [2] * 3


def test_a_reset_by_a_user_is_left_alone():
    starts, (first, *_), _ = reset_groups(Drawing)
    random.seed(3)
    observation = first.reset()
    random.seed(3)
    assert observation == f"number {random.randint(0, 10**9)}"


def test_a_copy_keeps_what_attributes_share():
    class Game(Secret):
        def reset(self, **columns):
            self.history = []
            self.state = {"number": self._draw(), "history": self.history}

    _, (_, second, *_), _ = reset_groups(Game)
    assert second.state["history"] is second.history


def test_a_state_with_functions_or_methods_is_not_copied():
    """A copied function would act on the environment in which it was made."""

    class WithFunction(Secret):
        def reset(self, **columns):
            self.number, self.moves = self._draw(), []
            self.move = {"function": lambda: self.moves.append(1)}

    class WithMethod(FromSystem):
        def reset(self, **columns):
            self.number, self.draw = self._draw(), self._draw

    for environment_class in (WithFunction, WithMethod):
        starts, environments, _ = reset_groups(environment_class)
        assert len({environment.number for environment in environments}) == 6
        assert starts.differing.keys() == {0, 1} and "cannot be copied (TypeError: it holds the" in starts.differing[0]


def test_a_reset_that_calls_itself_is_one_start():
    class Retries(Drawing):
        def reset(self, **columns):
            self.number = self._draw()
            return self.reset() if self.number % 3 else str(self.number)

    starts, environments, _ = reset_groups(Retries)
    numbers = [environment.number for environment in environments]
    assert numbers == numbers[:1] * 3 + numbers[3:4] * 3 and not starts.differing
    assert [group for group, _ in starts.observations] == [0] * 3 + [1] * 3


def test_groups_whose_resets_are_not_all_called_count_as_different():
    starts = GroupStarts()
    environments = [starts.wrap(Drawing)() for _ in range(4)]
    starts.begin([0, 0, 1, 1], [5, 5, 6, 6])
    for environment in environments[:3]:
        environment.reset()
        environment.reset()  # again, by whoever
    starts.end()
    assert starts.differing == {1: "`reset` was not called for each of its completions"}


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_environment_resets_itself(copy_of):
    _, (first, *_), _ = reset_groups(FromSystem)
    number = first.number
    copy_of(first).reset()
    assert first.number == number


def test_frozen_classes_and_slots_start_a_group_alike():
    """Also slots of a base class, beside attributes in `__dict__`."""

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        numbers: list = dataclasses.field(default_factory=list)

        def reset(self, **columns):
            self.numbers[:] = [random.SystemRandom().random()]

    class Slots:
        __slots__ = ("number", "text")

        def reset(self, **columns):
            self.number = random.SystemRandom().random()

        def guess(self) -> float:
            """Tell the number."""
            return self.number

    class SlotsAndMore(Slots):
        def reset(self, **columns):
            super().reset()
            self.more = [self.number]

    @dataclasses.dataclass(frozen=True, slots=True)
    class FrozenSlots:
        numbers: list = dataclasses.field(default_factory=list)

        def reset(self, **columns):
            self.numbers[:] = [random.SystemRandom().random()]

    _, (first, second, *_), _ = reset_groups(Frozen)
    assert first.numbers == second.numbers and first.numbers is not second.numbers
    for cls in (Slots, SlotsAndMore):
        _, (first, second, *others), _ = reset_groups(cls)
        assert first.number == second.number == first.guess() and isinstance(first, cls)
        assert {first.number} != {each.number for each in others}
        before = first.number
        first.reset()  # its own, which is no start of a group
        assert first.number != before
    _, (first, second, *_), _ = reset_groups(FrozenSlots)
    assert first.numbers == second.numbers and first.numbers is not second.numbers


def test_columns_may_have_the_names_of_parameters_of_this_package():
    """TRL forwards a column `environment` where a run has one environment only."""

    class Slots:
        __slots__ = ("columns",)

        def reset(self, **columns):
            self.columns = columns

    class Attributes:
        def reset(self, **columns):
            self.columns = columns

    row = {"environment": "sums", "reset": "yes", "cls": "A"}
    for cls in (Slots, Attributes):
        _, (first, *_), _ = reset_groups(cls, rows=(row,))
        assert first.columns == row


@pytest.mark.parametrize(
    ("observation", "words"),
    [(7, "returned 7. It must return text"), (["a"], r"returned \['a'\]"), ({"a": 1}, "{'a': 1}")],
)
def test_observations_that_are_no_content_of_a_message_are_refused(observation, words):
    class Returning:
        def reset(self, **columns):
            return observation

    with pytest.raises(ValueError, match=words):
        reset_groups(Returning)
    with pytest.raises(ValueError, match=words):
        prepare_environments(Returning, {"train_dataset": Dataset.from_dict({"prompt": ["a"]})})


def test_an_asynchronous_reset_is_refused_as_trl_does_not_await_it():
    class Later:
        async def reset(self, **columns):
            return "text"

    with pytest.raises(ValueError, match="`reset` of the environment Later is asynchronous"):
        prepare_environments(Later, {"train_dataset": Dataset.from_dict({"prompt": ["a"]})})


def test_states_are_compared_by_their_attributes():
    """`==` of dataclasses with arrays fails, and `__eq__` of a user may ignore an attribute."""

    @dataclasses.dataclass
    class Board:
        cells: object
        goal: int

    class Goal:
        def __init__(self, goal):
            self.goal = goal

        def __eq__(self, other):
            return True

        __hash__ = None

    for state in (partial(Board, np.zeros((2, 2))), partial(Board, torch.zeros(2, 2)), Goal):

        class OfState(FromSystem):
            def reset(self, create=state, **columns):
                self.state = create(goal=self._draw())

        starts, environments, _ = reset_groups(OfState)
        goals = [environment.state.goal for environment in environments]
        assert goals == goals[:1] * 3 + goals[3:4] * 3 and goals[0] != goals[3] and not starts.differing


def test_functions_with_a_variable_that_is_not_assigned_yet_are_compared():
    class WithEmptyCell:
        def reset(self, **columns):
            def later():
                return assigned_later

            self.later, self.number = later, 1
            if self.number > 1:
                assigned_later = 2
            return "start"

    class WithOneCell(Drawing):
        """The cell of the first environment of a group is filled."""

        count = itertools.count()

        def reset(self, **columns):
            def later():
                return assigned_later

            self.later = later
            if next(WithOneCell.count) % 3 == 0:
                assigned_later = 2
            return "start"

    starts, _, _ = reset_groups(WithEmptyCell)
    assert not starts.differing
    starts, _, _ = reset_groups(WithOneCell)
    assert starts.differing.keys() == {0, 1} and "it holds the function" in starts.differing[0]


@pytest.mark.parametrize(("default", "takes_seed"), [(None, True), (3, True), ("apple", False), (True, False)])
def test_a_default_that_is_no_number_is_left_alone(default, takes_seed):
    class WithDefault:
        def reset(self, seed=default, **columns):
            self.seed = seed

    _, (first, *_), _ = reset_groups(WithDefault)
    assert first.seed == (5 if takes_seed else default)


# Runs -----------------------------------------------------------------------------------------------------------


def trainer_of(path, environment, trainer_class=GRPOTrainer, reward=None, dataset=None, **settings):
    """A trainer of which `numbers` are those of the environments of each generation batch, four per group."""
    numbers = []

    def parity(completions, environments, **kwargs):
        numbers.append([each.number for each in environments])
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    more = {"processing_class": copy.deepcopy(TOKENIZER), "environment_factory": environment, "train_dataset": dataset}
    settings = {"max_steps": 4, "max_completion_length": 8} | settings
    trainer = build_trainer(path, reward=reward or parity, more=more, trainer_class=trainer_class, **settings)
    trainer.numbers = numbers
    return trainer


@pytest.mark.trains
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PACSTrainer])
def test_a_run_in_a_random_environment_and_its_resume(tmp_path, trainer_class):
    """The first example of TRL's documentation of agents: no dataset, and a random task in each `reset`."""
    settings = {"save_strategy": "steps", "save_steps": 1, "trainer_class": trainer_class}
    straight = trainer_of(tmp_path / "straight", Drawing, **settings)
    straight.train()
    groups = [batch[start : start + 4] for batch in straight.numbers for start in (0, 4)]
    assert all(len(set(group)) == 1 for group in groups) and len({group[0] for group in groups}) == 8
    logs = [log for log in straight.state.log_history if "loss" in log]
    assert [log["environments/different_start_fraction"] for log in logs] == [0] * 4
    again = trainer_of(tmp_path / "again", Drawing, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert again.numbers == straight.numbers[2:]
    assert_same_models(straight, again)


@pytest.mark.parametrize(
    ("trainer_class", "words"),
    [
        (GRPOTrainer, "GRPO subtracts the mean reward of the group"),
        (RLOOTrainer, "RLOO subtracts the mean reward of the other completions"),
        (PACSTrainer, "PACS scores a completion relative to"),
    ],
)
def test_groups_with_different_starts_are_counted_and_reported_once(tmp_path, caplog, trainer_class, words):
    trainer = trainer_of(tmp_path, RefusesCopies, trainer_class, max_steps=2)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["environments/different_start_fraction"] for log in logs] == [1] * 2
    (message,) = [record.message for record in caplog.records if "different states" in record.message]
    assert words in message and "def reset(self, seed" in message and "it is a handle" in message


class HiddenOnServer(OnServer):
    def reset(self, **columns):
        super().reset()
        return "guess"


def test_a_start_that_cannot_be_known_is_not_logged_as_equal(tmp_path, caplog):
    trainer = trainer_of(tmp_path, HiddenOnServer, max_steps=2)
    trainer.train()
    assert not any("environments/different_start_fraction" in log for log in trainer.state.log_history)
    (message,) = [record.message for record in caplog.records if "It is not known whether" in record.message]
    assert "2 of 2 groups" in message and "def reset(self, seed" in message


def test_evaluations_repeat_their_starts_and_more_completions_have_those_of_their_group(tmp_path):
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 2})
    trainer = trainer_of(tmp_path, Drawing, per_device_eval_batch_size=8)
    trainer.evaluate(dataset)
    trainer.train()
    for _ in range(2):
        trainer.evaluate(dataset)
    assert trainer.numbers[0] == trainer.numbers[-2] == trainer.numbers[-1] not in trainer.numbers[1:-2]
    trainer.model.train()
    trainer.generate_more([dataset[0]], 4, groups=[7])
    assert trainer.numbers[-1] == trainer.numbers[4][4:]  # the last group of the last batch


def test_examples_are_routed_by_name_without_prompts(tmp_path):
    """Each `reset` gets the columns but `environment`."""
    columns = defaultdict(set)

    class First(Drawing):
        def reset(self, **row):
            columns[type(self).__name__].update(row)
            return super().reset()

    class Second(First):
        pass

    dataset = Dataset.from_dict({"environment": ["first", "second"] * 2, "level": [1, 2, 1, 2]})
    factories = {"first": First, "second": Second}
    trainer_of(tmp_path, factories, dataset=dataset, max_steps=1).train()
    assert columns == {"First": {"level"}, "Second": {"level"}}


def test_wrong_routing_is_an_error_before_generation(tmp_path):
    factories = {"first": Drawing, "second": FromSystem}
    with pytest.raises(ValueError, match="requires a `train_dataset`"):
        trainer_of(tmp_path, factories)
    with pytest.raises(ValueError, match="train_dataset has no column `environment`.*'first', 'second'"):
        trainer_of(tmp_path, factories, dataset=Dataset.from_dict({"level": [1, 2]}))
    trainer = trainer_of(tmp_path, factories, dataset=Dataset.from_dict({"environment": ["first", "third"]}))
    trainer._generate_and_score_completions = lambda inputs: pytest.fail("generated")
    with pytest.raises(ValueError, match="Row 1 .*environment='third', which is not among the environments"):
        trainer.train()


def test_each_announced_reset_has_a_group_and_a_seed():
    with pytest.raises(ValueError, match="shorter"):
        GroupStarts().begin(groups=[0, 0], seeds=[1])
