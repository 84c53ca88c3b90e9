"""Training problems: `prompt` and `solution` from the rows of a dataset.

Named training sets and benchmarks are in `problem_sets.yaml`. Both use the loader of
`sets.py` and the prompt builder of `prompts.py`. Mixing several sets and streaming are not supported.
"""

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyarrow import ArrowException

from ..errors import UserError
from ..settings.checks import refuse_illegal_values
from ..settings.fields import setting
from . import gym
from .images import COLUMNS as IMAGE_COLUMNS
from .images import dataset_prompt_lengths, has_images, with_absolute_paths
from .messages import MessageCheck, content_as_text
from .prompts import PROMPT_INSTRUCTION, is_conversation, prompt_of, read_problem
from .prompts import build_prompt as build_prompt
from .sets import (
    ProblemSet,
    choose_columns,
    gold_answer,
    is_data_file,
    is_function,
    load_rows,
    named_sets,
    require_columns,
)


if TYPE_CHECKING:  # slow to import, and `--help` needs this module
    from datasets import Dataset


logger = logging.getLogger(__name__)


def _from_verl(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert rows of verl, whose problem is the last turn of `prompt` and whose answer is `ground_truth` in
    `reward_model`."""
    converted = []
    for row in rows:
        if isinstance(row.get("prompt"), list):
            last_turn = content_as_text(row["prompt"][-1])
            row_with_answer = row.get("reward_model") or row  # flat rows have the answer beside the prompt
            row = {"problem": last_turn.get("content"), "answer": row_with_answer.get("ground_truth")} | row
        converted.append(row)
    return converted


TRAINING_SETS = named_sets("training", {"rlpr": _from_verl})


@dataclass
class DataArguments:
    """Arguments that select and prepare the training problems."""

    # Parameters that select the data
    dataset_name: str = field(
        metadata={
            "help": "A named set (`deepscaler`, `gsm8k`, `math`, `rlpr`; programs: `verifiable_coding`), "
            "`reasoning_gym`, a path to a `.jsonl`, `.json`, or `.parquet` file or to a folder of a dataset, a "
            "dataset id on the Hub, or a function of your own that returns rows, `package.module:function`."
        }
    )
    dataset_path: str | None = setting(None, "Local file with the columns of the named set, read instead of the Hub.")
    dataset_config: str | None = setting(None, "Configuration of the Hub dataset; named sets have a default.")
    dataset_split: str | None = setting(None, "Split to train on; `train` by default.")
    dataset_revision: str | None = setting(None, "Commit, tag, or branch on the Hub; named sets have a default.")

    # Parameters that control prompts and solutions
    problem_column: str | None = setting(
        None,
        "Column with the problem as text, or with messages, which are the prompt. By default that of the "
        "named set, else the first of `prompt` (text or messages, unchanged), `problem`, `question`, and "
        "`messages`.",
    )
    solution_column: str | None = setting(
        None,
        "Column with the gold answer. By default that of the named set, else `answer` or `solution` (first "
        "`solution` if there is a `prompt`), else the last turn of `messages`.",
    )
    prompt_instruction: str = setting(
        PROMPT_INSTRUCTION,
        "Sentence appended to the problem after a space; empty for none. Sets of programming problems have "
        "another default.",
    )
    system_prompt: str | None = setting(None, "Content of the system turn; replaces that of messages in the data.")

    # Parameters that control size, order, and split
    max_prompt_length: int | None = setting(
        None, "Longest prompt in tokens, chat template included; longer ones are dropped and counted.", least=1
    )
    max_train_samples: int | None = setting(None, "Number of problems to use, chosen after the shuffle.", least=1)
    dataset_seed: int = setting(42, "Seed of the shuffle.")
    eval_split_size: int = setting(
        0, "Number of problems held out for evaluation during training; 0 for none.", least=0
    )

    # Parameters that control generated problems
    reasoning_gym: dict | None = setting(
        None,
        "Tasks of `dataset_name: reasoning_gym`, each with `weight`, `config`, and `answer`: `{chain_sum: "
        "{weight: 1, config: {max_terms: 2}, answer: last_number}}`.",
    )
    dataset_size: int | None = setting(
        None,
        "Number of problems that reasoning-gym generates; 1000 by default. Their seeds are `dataset_seed` "
        "and the following ones.",
        least=1,
    )

    def __post_init__(self):
        refuse_illegal_values(self)
        if not self.dataset_name.strip():
            raise UserError("dataset_name is empty. Set it to a named set, a file, a folder, or a dataset on the Hub.")
        is_gym = self.dataset_name == gym.NAME
        is_file = self.dataset_path is not None or is_data_file(self.dataset_name)
        is_loaded_by_datasets = not (is_file or is_gym or is_function(self.dataset_name))
        is_read = {
            "dataset_config": is_loaded_by_datasets,
            "dataset_revision": is_loaded_by_datasets,
            "dataset_split": is_loaded_by_datasets,
            "dataset_path": self.dataset_name in TRAINING_SETS,
            gym.NAME: is_gym,
            "dataset_size": is_gym,
        }
        for name in is_read:
            if getattr(self, name) is not None and not is_read[name]:
                self._refuse_ignored(name)
        if is_gym:
            gym.check_settings(self)

    def _refuse_ignored(self, name: str) -> None:
        """Raise a `ValueError` on a setting that is not for the data of the other settings."""
        if name == "dataset_path":
            purpose = f"the named sets {', '.join(TRAINING_SETS)}"
        elif name in (gym.NAME, "dataset_size"):
            purpose = f"dataset_name: {gym.NAME}"
        else:
            purpose = "datasets on the Hub and folders"
        data = f"dataset_name={self.dataset_name!r}"
        if self.dataset_path is not None:
            data += f" and dataset_path={self.dataset_path!r}"
        raise UserError(f"`{name}` would be ignored with {data}. Remove it: {name} is for {purpose}.")


class HasInstruction(Protocol):
    """A set of problems, or a benchmark, that may have an instruction in place of the default one."""

    @property
    def instruction(self) -> str | None: ...


def instruction_for(problems: HasInstruction, prompt_instruction: str) -> str:
    """Return the instruction of a set of problems, unless the user has set another than the default."""
    if problems.instruction is not None and prompt_instruction == PROMPT_INSTRUCTION:
        return problems.instruction
    return prompt_instruction


def unread_template_arguments(
    tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None, template: str | None = None
) -> list[str]:
    """Return the keys that neither the chat template (by default the tokenizer's) nor `apply_chat_template` reads, so
    that they change no prompt."""
    template = template or getattr(tokenizer, "chat_template", None)
    if not chat_template_kwargs or template is None:
        return []
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return [
        key
        for key in chat_template_kwargs
        if key not in parameters and not re.search(rf"\b{re.escape(key)}\b", str(template))
    ]


def check_chat_template_kwargs(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None) -> None:
    """Raise a `ValueError` on a key that the chat template of the tokenizer would ignore."""
    unread = unread_template_arguments(tokenizer, chat_template_kwargs)
    if unread:
        raise UserError(
            f"chat_template_kwargs: the chat template would ignore {', '.join(unread)}. Correct or remove it, or "
            "give the tokenizer another template."
        )


def load_training_data(
    args: DataArguments,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    load_processor: Callable[[], Any] | None = None,
    *,
    needs_solution: bool = True,
) -> "tuple[Dataset, Dataset | None]":
    """
    Load, prepare, filter, shuffle, and split the training problems. `tokenizer` and `chat_template_kwargs` measure
    prompt lengths; if the data has images, the result of `load_processor` instead of the tokenizer. Without
    `needs_solution`, the data may have no gold answers; the examples then have no column `solution`.

    Rows without a problem or a gold answer and overlong prompts are dropped and counted in a warning. An unused
    `prompt` or `solution` column of the source is replaced; every other column is kept, but for the column of gold
    answers, which is equal to `solution` if it has numbers: `{"answer": 8}` reaches reward functions as text in both.

    Returns:
        Training and evaluation examples with columns `prompt` (messages, or text where the data has text prompts) and
        `solution` (text, or lists of text if any row has alternatives). The second is `None` if `eval_split_size` is
        0.

    Raises:
        ValueError: On an unknown name, file, column, or key of `chat_template_kwargs`, or if too few rows are left.
    """
    # Load
    problem_set = _problem_set(args)
    path = args.dataset_name if is_data_file(args.dataset_name) else args.dataset_path
    if args.dataset_name == gym.NAME:
        assert args.reasoning_gym is not None  # checked by `DataArguments`
        rows = gym.gym_rows(args.reasoning_gym, args.dataset_size or gym.DEFAULT_SIZE, args.dataset_seed)
    else:
        rows = load_rows(args.dataset_name, problem_set, path)
    if path is not None:
        rows = [with_absolute_paths(row, Path(path).parent) for row in rows]

    # Prepare and check
    dataset = _prepare(rows, problem_set, args, needs_solution=needs_solution)
    if not all(isinstance(prompt, str) for prompt in dataset["prompt"]):
        check_chat_template_kwargs(tokenizer, chat_template_kwargs)
    if tokenizer is not None and load_processor is not None and has_images(dataset):
        tokenizer = load_processor()
    if tokenizer is not None:
        MessageCheck(tokenizer, chat_template_kwargs).check(repr(args.dataset_name), dataset["prompt"])

    # Filter, shuffle, and split
    limit = args.max_prompt_length
    if limit is not None:
        lengths = dataset_prompt_lengths(repr(args.dataset_name), dataset, tokenizer, chat_template_kwargs)
        fitting = [i for i, length in enumerate(lengths) if length <= limit]
        if len(fitting) < len(dataset):
            logger.warning(
                f"Dropped {len(dataset) - len(fitting)} of {len(dataset)} prompts of {args.dataset_name} that are "
                f"longer than max_prompt_length {limit} tokens (longest: {max(lengths)})."
            )
        dataset = dataset.select(fitting)
    return shuffled_and_split(dataset, args)


def _problem_set(args: DataArguments) -> ProblemSet:
    """Return the named set, or a description of the user's data, with what the settings say otherwise."""
    if args.dataset_name == gym.NAME:
        problem_set = ProblemSet(gym.NAME, instruction=gym.INSTRUCTION)
    elif args.dataset_name in TRAINING_SETS:
        problem_set = TRAINING_SETS[args.dataset_name]
    else:
        problem_set = ProblemSet(args.dataset_name, revision="main")
    settings: dict[str, Any] = {
        "revision": args.dataset_revision,
        "config": args.dataset_config,
        "split": args.dataset_split,
        "problem_column": args.problem_column,
        "solution_column": args.solution_column,
    }
    if args.solution_column:
        settings["answer_in"] = "column"
    return replace(problem_set, **{name: value for name, value in settings.items() if value is not None})


def shuffled_and_split(dataset: "Dataset", args: DataArguments) -> "tuple[Dataset, Dataset | None]":
    """Return training and evaluation examples; the second is `None` if `eval_split_size` is 0. Raises a `ValueError`
    if none is left for training."""
    if len(dataset) <= args.eval_split_size:
        raise UserError(_too_few_rows(len(dataset), args))
    dataset = dataset.shuffle(seed=args.dataset_seed)
    # Held-out rows come first, so that they do not depend on `max_train_samples`.
    evaluation = dataset.select(range(args.eval_split_size)) if args.eval_split_size else None
    stop = min(len(dataset), args.eval_split_size + (args.max_train_samples or len(dataset)))
    return dataset.select(range(args.eval_split_size, stop)), evaluation


def _too_few_rows(num_rows: int, args: DataArguments) -> str:
    limit = f", and at most max_prompt_length={args.max_prompt_length} tokens" if args.max_prompt_length else ""
    problem = f"No row of {args.dataset_name!r} has a problem and a gold answer{limit}"
    if num_rows > 0:
        problem = (
            f"Only {num_rows} rows of {args.dataset_name!r} have a problem and a gold answer{limit}; "
            f"eval_split_size={args.eval_split_size} holds them all out"
        )
    return f"{problem}. Change these settings, or use more data."


def _prepare(
    rows: list[dict[str, Any]], problem_set: ProblemSet, args: DataArguments, *, needs_solution: bool
) -> "Dataset":
    """Build `prompt` and `solution`; drop and count rows without a problem or gold. If no row has a gold and none is
    needed, there is no `solution`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    source = args.dataset_path or args.dataset_name
    if args.dataset_name not in TRAINING_SETS:
        problem_set = choose_columns(problem_set, names, args.problem_column, args.solution_column)
    problem_column, solution_column = problem_set.problem_column, problem_set.solution_column
    required_columns = {"problem_column": problem_column}
    if needs_solution or args.solution_column:
        required_columns["solution_column"] = solution_column
    require_columns(source, rows, required_columns)
    instruction = instruction_for(problem_set, args.prompt_instruction)

    problems, golds = [], []
    for index, row in enumerate(rows):
        try:
            problems.append(read_problem(row.get(problem_column), problem_column))
            golds.append(gold_answer(row.get(solution_column), problem_set.answer_in))
        except ValueError as error:
            raise UserError(f"Row {index} of {source!r}: {error}") from error
    has_golds = needs_solution or any(gold is not None for gold in golds)

    usable_rows, prompts, solutions = [], [], []
    num_mappings = 0  # of rows without a gold answer, which have a mapping in its place
    for row, problem, gold in zip(rows, problems, golds, strict=True):
        if problem and gold is None and has_golds and isinstance(row.get(solution_column), Mapping):
            num_mappings += 1
        if not problem or (gold is None and has_golds):
            continue
        system_prompt = args.system_prompt
        if system_prompt is None and isinstance(problem, str) and not problem_set.is_prompt:
            system_prompt = _system_prompt_of_row(row)
        prompts.append(
            prompt_of(problem, is_prompt=problem_set.is_prompt, instruction=instruction, system_prompt=system_prompt)
        )
        solutions.append(gold)
        usable_rows.append(row)
    if len(usable_rows) < len(rows):
        message = (
            f"Dropped {len(rows) - len(usable_rows)} of {len(rows)} rows of {args.dataset_name} that have no problem "
            "or no gold answer."
        )
        if num_mappings:
            message += (
                f" In {num_mappings} of them `{solution_column}` is a mapping, which is read as tests of a program. "
                "Write an answer as text, or tests as docs/code.md says."
            )
        logger.warning(message)

    columns: dict[str, list[Any]] = {name: [row.get(name) for row in usable_rows] for name in names}
    return _to_dataset(columns, prompts, solutions if has_golds else None, solution_column, source)


def _system_prompt_of_row(row: Mapping[str, Any]) -> str | None:
    """Return the system turn of a row of verl, whose column `prompt` has the messages; `None` if there is none."""
    if not is_conversation(row.get("prompt")):
        return None
    for turn in row["prompt"]:
        if turn["role"] == "system":
            return content_as_text(turn).get("content")
    return None


def _to_dataset(
    columns: dict[str, list[Any]],
    prompts: list[Any],
    solutions: list[Any] | None,
    solution_column: str,
    source: str,
) -> "Dataset":
    """Return a dataset with the columns of the data and `prompt` and, of data with gold answers, `solution`. Values of
    a column must have one type: solutions become lists if any is one, and replace a column of gold answers that has
    numbers or several types. Raises a `ValueError` for other columns of several types."""
    from datasets import Dataset

    columns["prompt"] = prompts
    if solutions is not None:
        if any(isinstance(solution, list) for solution in solutions):
            solutions = [solution if isinstance(solution, list) else [solution] for solution in solutions]
        golds = columns.get(solution_column, [])
        if any(_holds_number(gold) for gold in golds) or _type_error(golds) is not None:
            columns[solution_column] = solutions
        columns["solution"] = solutions
    for name in IMAGE_COLUMNS:  # of sets for text and images
        if name in columns and all(value is None for value in columns[name]):
            del columns[name]
    for name, values in columns.items():
        type_error = _type_error(values)
        if type_error is not None:
            raise UserError(
                f"The column `{name}` of {source!r} has values of mixed types ({type_error}). Write all of them "
                "alike, for example as text."
            ) from type_error
    return Dataset.from_dict(columns)


def _holds_number(value: Any) -> bool:
    """Whether a cell is a number or a list with one."""
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, Number) for part in parts)


def _type_error(values: list[Any]) -> Exception | None:
    """Return the error if the values do not fit into one column of a dataset, else `None`."""
    from datasets import Dataset

    try:
        Dataset.from_dict({"values": values})
    except (ArrowException, OverflowError, UnicodeError) as error:
        return error
    return None
