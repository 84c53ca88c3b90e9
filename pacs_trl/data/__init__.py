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
            problem = content_as_text(row["prompt"][-1]).get("content")
            answer = (row.get("reward_model") or row).get("ground_truth")
            row = {"problem": problem, "answer": answer} | row
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
        is_loaded = not (is_file or is_gym or is_function(self.dataset_name))  # by the library datasets
        allowed = {
            "dataset_config": is_loaded,
            "dataset_revision": is_loaded,
            "dataset_split": is_loaded,
            "dataset_path": self.dataset_name in TRAINING_SETS,
            gym.NAME: is_gym,
            "dataset_size": is_gym,
        }
        ignored = [name for name in allowed if getattr(self, name) is not None and not allowed[name]]
        if ignored:
            self._refuse_ignored(ignored[0])
        if is_gym:
            gym.check_settings(self)

    def _refuse_ignored(self, name: str) -> None:
        """Raise a `ValueError` on a setting that is not for the data of the other settings."""
        purpose = "datasets on the Hub and folders"
        if name == "dataset_path":
            purpose = f"the named sets {', '.join(TRAINING_SETS)}"
        elif name in (gym.NAME, "dataset_size"):
            purpose = f"dataset_name: {gym.NAME}"
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
    if unread := unread_template_arguments(tokenizer, chat_template_kwargs):
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
    entry = _problem_set(args)
    path = args.dataset_name if is_data_file(args.dataset_name) else args.dataset_path
    if args.dataset_name == gym.NAME:
        assert args.reasoning_gym is not None  # checked by `DataArguments`
        rows = gym.gym_rows(args.reasoning_gym, args.dataset_size or gym.DEFAULT_SIZE, args.dataset_seed)
    else:
        rows = load_rows(args.dataset_name, entry, path)
    if path is not None:
        rows = [with_absolute_paths(row, Path(path).parent) for row in rows]
    dataset = _prepare(rows, entry, args, needs_solution)
    if not all(isinstance(prompt, str) for prompt in dataset["prompt"]):
        check_chat_template_kwargs(tokenizer, chat_template_kwargs)
    if tokenizer is not None and load_processor is not None and has_images(dataset):
        tokenizer = load_processor()
    if tokenizer is not None:
        MessageCheck(tokenizer, chat_template_kwargs).check(repr(args.dataset_name), dataset["prompt"])
    if (limit := args.max_prompt_length) is not None:
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
        entry = ProblemSet(gym.NAME, instruction=gym.INSTRUCTION)
    else:
        entry = TRAINING_SETS.get(args.dataset_name) or ProblemSet(args.dataset_name, revision="main")
    settings: dict[str, Any] = {
        "revision": args.dataset_revision,
        "config": args.dataset_config,
        "split": args.dataset_split,
        "problem_column": args.problem_column,
        "solution_column": args.solution_column,
    }
    if args.solution_column:
        settings["answer_in"] = "column"
    return replace(entry, **{field: value for field, value in settings.items() if value is not None})


def shuffled_and_split(dataset: "Dataset", args: DataArguments) -> "tuple[Dataset, Dataset | None]":
    """Return training and evaluation examples; the second is `None` if `eval_split_size` is 0."""
    if len(dataset) <= args.eval_split_size:
        count = f"Only {len(dataset)} rows" if len(dataset) else "No row"
        limit = f", and at most max_prompt_length={args.max_prompt_length} tokens" if args.max_prompt_length else ""
        all_held_out = f"; eval_split_size={args.eval_split_size} holds them all out" if len(dataset) else ""
        raise UserError(
            f"{count} of {args.dataset_name!r} {'have' if len(dataset) else 'has'} a problem and a gold answer"
            f"{limit}{all_held_out}. Change these settings, or use more data."
        )
    dataset = dataset.shuffle(seed=args.dataset_seed)
    # Held-out rows come first, so that they do not depend on `max_train_samples`.
    evaluation = dataset.select(range(args.eval_split_size)) if args.eval_split_size else None
    stop = min(len(dataset), args.eval_split_size + (args.max_train_samples or len(dataset)))
    return dataset.select(range(args.eval_split_size, stop)), evaluation


def _prepare(rows: list[dict[str, Any]], entry: ProblemSet, args: DataArguments, needs_solution: bool) -> "Dataset":
    """Build `prompt` and `solution`; drop and count rows without a problem or gold. If no row has a gold and none is
    needed, there is no `solution`."""
    from datasets import Dataset

    names = list(dict.fromkeys(name for row in rows for name in row))
    source = args.dataset_path or args.dataset_name
    if args.dataset_name not in TRAINING_SETS:
        entry = choose_columns(entry, names, args.problem_column, args.solution_column)
    required = {"problem_column": entry.problem_column}
    if needs_solution or args.solution_column:
        required["solution_column"] = entry.solution_column
    require_columns(source, rows, required)
    instruction = instruction_for(entry, args.prompt_instruction)
    problems, golds = [], []
    for index, row in enumerate(rows):
        try:
            problems.append(read_problem(row.get(entry.problem_column), entry.problem_column))
            golds.append(gold_answer(row.get(entry.solution_column), entry.answer_in))
        except ValueError as error:
            raise UserError(f"Row {index} of {source!r}: {error}") from error
    has_golds = needs_solution or any(gold is not None for gold in golds)
    usable, prompts = [], []
    solutions: list[str | list[str]] = []
    num_mappings = 0  # of rows without a gold answer, which have a mapping in its place
    for row, problem, gold in zip(rows, problems, golds, strict=True):
        if not problem:
            continue
        if gold is not None:
            solutions.append(gold)
        elif has_golds:
            num_mappings += isinstance(row.get(entry.solution_column), Mapping)
            continue
        system_prompt = args.system_prompt
        if system_prompt is None and isinstance(problem, str) and not entry.is_prompt:
            turns = row["prompt"] if is_conversation(row.get("prompt")) else []  # rows of verl
            system_turns = [content_as_text(turn) for turn in turns if turn["role"] == "system"]
            system_prompt = system_turns[0].get("content") if system_turns else None
        prompt = prompt_of(problem, is_prompt=entry.is_prompt, instruction=instruction, system_prompt=system_prompt)
        prompts.append(prompt)
        usable.append(row)
    if len(usable) < len(rows):
        dropped = f"Dropped {len(rows) - len(usable)} of {len(rows)} rows of {args.dataset_name}"
        message = f"{dropped} that have no problem or no gold answer."
        if num_mappings:
            message += (
                f" In {num_mappings} of them `{entry.solution_column}` is a mapping, which is read as tests of a "
                "program. Write an answer as text, or tests as docs/code.md says."
            )
        logger.warning(message)
    if any(isinstance(solution, list) for solution in solutions):  # a column has one type
        solutions = [solution if isinstance(solution, list) else [solution] for solution in solutions]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in usable] for name in names}
    cells = columns.get(entry.solution_column, [])
    if has_golds and (any(_holds_number(cell) for cell in cells) or _type_error(cells) is not None):
        columns[entry.solution_column] = solutions  # also of text, numbers, and lists together
    for name in IMAGE_COLUMNS:  # of sets for text and images
        if name in columns and all(value is None for value in columns[name]):
            del columns[name]
    columns["prompt"] = prompts
    if has_golds:
        columns["solution"] = solutions
    for name, values in columns.items():
        if (type_error := _type_error(values)) is not None:
            raise UserError(
                f"The column `{name}` of {source!r} has values of mixed types ({type_error}). Write all of them "
                "alike, for example as text."
            ) from type_error
    return Dataset.from_dict(columns)


def _holds_number(value: Any) -> bool:
    """Whether a cell is a number or a list with one."""
    return any(isinstance(part, Number) for part in (value if isinstance(value, list) else [value]))


def _type_error(values: list[Any]) -> Exception | None:
    """Return the error if the values do not fit into one column of a dataset."""
    from datasets import Dataset

    try:
        Dataset.from_dict({"values": values})
    except (ArrowException, OverflowError, UnicodeError) as error:
        return error
    return None
