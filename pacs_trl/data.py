"""From dataset rows to `prompt` and `solution`: one prompt builder for training and for evaluation.

A score means nothing when training and evaluation ask the question in different words, so both call [`build_prompt`].
Named training sets are values of [`TrainingSet`]: adding a set is adding an entry to `TRAINING_SETS`. Benchmarks live in
`evaluation/benchmarks.py`; mixing several sets and streaming are left out.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowInvalid

from .settings import refuse_illegal_values
from .verification import gold_texts, last_boxed


logger = logging.getLogger(__name__)

# The sentence of the PACS training and evaluation prompts (arXiv 2509.02522, appendix C.1).
PROMPT_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class TrainingSet:
    """
    Where a named training set lives and how one row becomes a problem and a gold answer.

    Args:
        hub_id (`str`): Dataset repository on the Hub.
        revision (`str`): Commit of that repository: the rows a result was trained on do not change under it.
        problem_column (`str`): Column with the problem text.
        solution_column (`str`): Column that holds the gold answer.
        config (`str`, *optional*): Configuration of the dataset repository.
        split (`str`): Split to train on.
        answer_in (`str`): How the gold is read out of `solution_column`: `"column"` (the whole value), `"last_box"` (the
            content of the last `\\boxed{}`) or `"after_hashes"` (the text after `####`, without thousands separators).
    """

    hub_id: str
    revision: str
    problem_column: str
    solution_column: str
    config: str | None = None
    split: str = "train"
    answer_in: Literal["column", "last_box", "after_hashes"] = "column"


TRAINING_SETS: dict[str, TrainingSet] = {
    # The paper's training set: 40k competition problems with their final answers.
    "deepscaler": TrainingSet(
        hub_id="agentica-org/DeepScaleR-Preview-Dataset",
        revision="b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29",
        problem_column="problem",
        solution_column="answer",
    ),
    "gsm8k": TrainingSet(
        hub_id="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        config="main",
        problem_column="question",
        solution_column="answer",
        answer_in="after_hashes",
    ),
    # The original repository of MATH was taken down. This copy keeps the official 7,500 / 5,000 split in one
    # configuration; MATH-500 is part of its test split, so only the train split is used here.
    "math": TrainingSet(
        hub_id="DigitalLearningGmbH/MATH-lighteval",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
        problem_column="problem",
        solution_column="solution",
        answer_in="last_box",
    ),
    # BytedTsinghua-SIA/DAPO-Math-17k repeats every problem about a hundred times; this is its deduplicated form.
    "dapo_math_17k": TrainingSet(
        hub_id="open-r1/DAPO-Math-17k-Processed",
        revision="31dd309567e3da778038cc87d868b6097a3ccf68",
        config="en",
        problem_column="prompt",
        solution_column="solution",
    ),
}

# DAPO-Math-17k wraps each problem into its own instruction, which contradicts the \boxed{} one.
_DAPO_WRAPPER = re.compile(
    r"\ASolve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*(?P<problem>.*?)\s*"
    r"Remember to put your answer on its own line after \"Answer:\"\.\s*\Z",
    re.DOTALL,
)


@dataclass
class DataArguments:
    """
    Arguments that select and prepare the training problems.

    Args:
        dataset_name (`str`):
            A named set (`deepscaler`, `gsm8k`, `math`, `dapo_math_17k`), `miniature/<task>`, a path to a `.jsonl`,
            `.json` or `.parquet` file, or a dataset id on the Hub.
        dataset_path (`str`, *optional*):
            Local file in the column layout of the named set, read instead of the Hub.
        dataset_config (`str`, *optional*): Configuration of the Hub dataset; a named set brings its own.
        dataset_split (`str`, *optional*): Split to train on; `train` unless the named set says otherwise.
        dataset_revision (`str`, *optional*): Commit, tag or branch on the Hub; a named set brings its own.
        problem_column (`str`, *optional*): Column with the problem text; `problem` unless the named set says otherwise.
        solution_column (`str`, *optional*): Column with the gold answer; `answer` unless the named set says otherwise.
        prompt_instruction (`str`): Sentence put behind the problem, after one space. Empty: the problem alone.
        system_prompt (`str`, *optional*): Content of a system turn put before the problem.
        max_prompt_length (`int`, *optional*): Longest prompt in tokens, chat template included.
        overlong_prompts (`str`): What happens to longer prompts: `"filter"` drops and counts them, `"error"` stops.
        max_train_samples (`int`, *optional*): Use only so many problems, drawn after the shuffle.
        dataset_seed (`int`): Seed of the shuffle; the same seed gives the same rows in the same order.
        eval_split_size (`int`): Number of problems held out for evaluation during training. 0: none.
    """

    dataset_name: str = field(
        metadata={
            "help": "A named set (deepscaler, gsm8k, math, dapo_math_17k), miniature/<task>, a path to a .jsonl, .json "
            "or .parquet file, or a dataset id on the Hub."
        }
    )
    dataset_path: str | None = field(
        default=None, metadata={"help": "Local file in the column layout of the named set, read instead of the Hub."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub dataset."})
    dataset_split: str | None = field(default=None, metadata={"help": "Split to train on (default: train)."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Commit, tag or branch on the Hub."})
    problem_column: str | None = field(
        default=None, metadata={"help": "Column with the problem text (default: problem, or the named set's)."}
    )
    solution_column: str | None = field(
        default=None, metadata={"help": "Column with the gold answer (default: answer, or the named set's)."}
    )
    prompt_instruction: str = field(
        default=PROMPT_INSTRUCTION, metadata={"help": "Sentence behind the problem; empty for the problem alone."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Content of a system turn before the problem."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longest prompt in tokens, chat template included."}
    )
    overlong_prompts: str = field(
        default="filter", metadata={"help": "Prompts over the limit: 'filter' (drop and count) or 'error'."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Use only so many problems, drawn after the shuffle."}
    )
    dataset_seed: int = field(default=42, metadata={"help": "Seed of the shuffle."})
    eval_split_size: int = field(default=0, metadata={"help": "Problems held out for evaluation during training."})

    def __post_init__(self):
        if self.overlong_prompts not in ("filter", "error"):
            raise ValueError(f"`overlong_prompts` must be 'filter' or 'error', got {self.overlong_prompts!r}.")
        for name in ("max_prompt_length", "max_train_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it out for no limit.")
        if self.eval_split_size < 0:
            raise ValueError(f"`eval_split_size` must not be negative, got {self.eval_split_size}.")
        if self.dataset_path is not None and self.dataset_name not in TRAINING_SETS:
            raise ValueError(
                f"`dataset_path` replaces the download of a named set ({', '.join(TRAINING_SETS)}), but `dataset_name` "
                f"is {self.dataset_name!r}. Put the path itself into `dataset_name` and name the columns."
            )
        refuse_illegal_values(self)
        self._check_source_settings()

    def _check_source_settings(self):
        """Settings of the Hub say nothing about a file or a miniature task."""
        settings = {"dataset_config": self.dataset_config, "dataset_revision": self.dataset_revision}
        if self.dataset_path is not None or Path(self.dataset_name).suffix in _FILE_FORMATS:
            settings["dataset_split"] = self.dataset_split
        elif not self.dataset_name.startswith("miniature/"):
            return
        given = [name for name, value in settings.items() if value is not None]
        if given:
            raise ValueError(
                f"`{given[0]}` is {settings[given[0]]!r}, but {self.dataset_path or self.dataset_name!r} is not read "
                "from the Hub and has none. Remove the setting."
            )


def build_prompt(
    problem: str, *, instruction: str = PROMPT_INSTRUCTION, system_prompt: str | None = None
) -> list[dict[str, str]]:
    """
    The conversational prompt of one problem: problem, one space, instruction (arXiv 2509.02522, appendix C.1).

    Args:
        problem (`str`): Problem text; surrounding white space is removed.
        instruction (`str`): Sentence behind the problem. Empty: the problem alone.
        system_prompt (`str`, *optional*): Content of a leading system turn.

    Returns:
        `list[dict[str, str]]`: Messages with keys `role` and `content`.
    """
    content = f"{problem.strip()} {instruction}" if instruction else problem.strip()
    user = {"role": "user", "content": content}
    return [user] if system_prompt is None else [{"role": "system", "content": system_prompt}, user]


def gold_answer(value: Any, answer_in: str = "column") -> str | list[str] | None:
    """
    The gold answer held by one cell of a dataset.

    Args:
        value (`Any`): Text, number, or a list of alternatives; see [`~verification.gold_texts`].
        answer_in (`str`): See [`TrainingSet`].

    Returns:
        `str`, `list[str]` or `None`: The answer, alternatives when there are several, `None` when there is none.
    """
    texts = list(gold_texts(value))
    if answer_in == "last_box":
        texts = [content for text in texts if (content := last_boxed(text))]
    if answer_in == "after_hashes":
        answers = (text.rpartition("####")[2].strip().replace(",", "") for text in texts if "####" in text)
        texts = [answer for answer in answers if answer]
    return texts[0] if len(texts) == 1 else texts or None


def load_training_data(
    args: DataArguments, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[Dataset, Dataset | None]:
    """
    Load, prepare, filter, shuffle and split the training problems.

    Rows without a problem or without a gold answer are dropped and counted in a warning. A `prompt` or `solution` column
    of the source is replaced; every other column is kept.

    Args:
        args ([`DataArguments`]): What to load and how.
        tokenizer (`PreTrainedTokenizerBase`): Measures prompt lengths; its chat template is applied.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*): Passed to the chat template (`enable_thinking`, ...).

    Returns:
        `tuple[Dataset, Dataset | None]`: Training and evaluation rows with columns `prompt` (messages) and `solution`
        (text; lists of text when a row has several alternatives). The second is `None` for `eval_split_size` 0.

    Raises:
        ValueError: On an unknown name, file or column, an overlong prompt (`overlong_prompts: error`), or when too few
            rows are left.
    """
    rows, spec = _load_rows(args)
    for key, column in (("problem_column", spec.problem_column), ("solution_column", spec.solution_column)):
        if column not in rows.column_names:
            raise ValueError(
                f"`{key}` {column!r} is not a column of {args.dataset_path or args.dataset_name!r}. Columns found: "
                f"{', '.join(rows.column_names)}. Set `{key}` to one of them."
            )
    dataset = _prepare(rows, spec, args)
    if args.max_prompt_length is not None:
        dataset = _limit_prompt_length(
            dataset, args.max_prompt_length, args, tokenizer, dict(chat_template_kwargs or {})
        )
    dataset = dataset.shuffle(seed=args.dataset_seed)
    if len(dataset) <= args.eval_split_size:
        raise ValueError(
            f"`eval_split_size` is {args.eval_split_size}, but only {len(dataset)} usable rows of "
            f"{args.dataset_name!r} are left, so there is nothing to train on. Lower it or use more data."
        )
    # The held-out rows come first, so that they stay the same whatever `max_train_samples` is.
    evaluation = dataset.select(range(args.eval_split_size)) if args.eval_split_size else None
    stop = len(dataset)
    if args.max_train_samples is not None:
        stop = min(stop, args.eval_split_size + args.max_train_samples)
    return dataset.select(range(args.eval_split_size, stop)), evaluation


def _load_rows(args: DataArguments) -> tuple[Dataset, TrainingSet]:
    """The raw rows and the columns to read from them."""
    named = TRAINING_SETS.get(args.dataset_name)
    spec = TrainingSet(
        hub_id=named.hub_id if named else args.dataset_name,
        revision=args.dataset_revision or (named.revision if named else "main"),
        config=args.dataset_config or (named.config if named else None),
        split=args.dataset_split or (named.split if named else "train"),
        problem_column=args.problem_column or (named.problem_column if named else "problem"),
        solution_column=args.solution_column or (named.solution_column if named else "answer"),
        # A column the user names is taken as it is.
        answer_in=named.answer_in if named and not args.solution_column else "column",
    )
    if args.dataset_path is not None:
        return _read_file(args.dataset_path), spec
    if args.dataset_name.startswith("miniature/"):
        return _miniature_rows(args.dataset_name.removeprefix("miniature/"), spec.split), spec
    if Path(args.dataset_name).suffix in _FILE_FORMATS:
        return _read_file(args.dataset_name), spec
    return load_dataset(spec.hub_id, spec.config, split=spec.split, revision=spec.revision), spec


def _read_file(path: str) -> Dataset:
    suffix = Path(path).suffix
    if suffix not in _FILE_FORMATS:
        raise ValueError(f"{path!r} is no data file that can be read: the endings are {', '.join(_FILE_FORMATS)}.")
    if not Path(path).is_file():
        raise ValueError(f"The data file {path!r} does not exist (seen from {Path.cwd()}).")
    try:
        return load_dataset(_FILE_FORMATS[suffix], data_files=str(path), split="train")
    except (DatasetGenerationError, ArrowInvalid, StopIteration) as error:  # the last: a file without a row
        reason = " ".join(str(error.__cause__ or error).split()) or "it holds no rows"
        raise ValueError(f"The data file {path!r} cannot be read as {suffix}: {reason}.") from error


def _miniature_rows(task: str, split: str) -> Dataset:
    from .miniature.tasks import TASKS, problems

    if task not in TASKS:
        raise ValueError(f"There is no miniature task {task!r}. The tasks are: {', '.join(TASKS)}.")
    if split not in ("train", "test"):
        raise ValueError(f"`dataset_split` of a miniature task is 'train' or 'test', got {split!r}.")
    return Dataset.from_list(problems(task, "test" if split == "test" else "train"))


def _prepare(rows: Dataset, spec: TrainingSet, args: DataArguments) -> Dataset:
    """Add `prompt` and `solution`; drop and count rows without a problem or a gold."""
    problems = rows[spec.problem_column]
    for index, problem in enumerate(problems):
        if problem is not None and not isinstance(problem, str):
            raise ValueError(
                f"`problem_column` {spec.problem_column!r} must hold text, but row {index} holds a "
                f"{type(problem).__name__}. Name a column with the bare problem: the prompt is built from it."
            )
    golds = [gold_answer(value, spec.answer_in) for value in rows[spec.solution_column]]
    usable = [i for i, problem in enumerate(problems) if problem and problem.strip() and golds[i] is not None]
    if len(usable) < len(rows):
        logger.warning(
            "Dropped %d of %d rows of %s that have no problem or no gold answer.",
            len(rows) - len(usable),
            len(rows),
            args.dataset_name,
        )
    if not usable:
        raise ValueError(
            f"None of the {len(rows)} rows of {args.dataset_name!r} has both a problem ({spec.problem_column!r}) and a "
            f"gold answer ({spec.solution_column!r})."
        )
    solutions: list[Any] = [golds[i] for i in usable]
    if any(isinstance(solution, list) for solution in solutions):  # a column has one type
        solutions = [solution if isinstance(solution, list) else [solution] for solution in solutions]
    prompts = [
        build_prompt(
            _DAPO_WRAPPER.sub(r"\g<problem>", problems[i]),
            instruction=args.prompt_instruction,
            system_prompt=args.system_prompt,
        )
        for i in usable
    ]
    prepared = Dataset.from_dict({"prompt": prompts, "solution": solutions})
    others = [name for name in rows.column_names if name not in ("prompt", "solution")]
    if not others:
        return prepared
    return concatenate_datasets([rows.select(usable).select_columns(others), prepared], axis=1)


def _limit_prompt_length(
    dataset: Dataset, limit: int, args: DataArguments, tokenizer: Any, chat_template_kwargs: dict[str, Any]
) -> Dataset:
    """Drop and count the prompts over `limit` tokens, or stop because of them, as configured."""
    lengths = [
        len(ids)
        for start in range(0, len(dataset), 1000)
        for ids in tokenizer.apply_chat_template(
            dataset[start : start + 1000]["prompt"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **chat_template_kwargs,
        )
    ]
    overlong = [i for i, length in enumerate(lengths) if length > limit]
    if not overlong:
        return dataset
    if args.overlong_prompts == "error":
        raise ValueError(
            f"{len(overlong)} of {len(dataset)} prompts are longer than `max_prompt_length` {limit} tokens; the first "
            f"is row {overlong[0]} with {lengths[overlong[0]]}. Raise the limit to {max(lengths)} or set "
            "`overlong_prompts: filter` to drop them."
        )
    logger.warning(
        "Dropped %d of %d prompts of %s that are longer than max_prompt_length %d tokens (longest: %d).",
        len(overlong),
        len(dataset),
        args.dataset_name,
        limit,
        max(lengths),
    )
    return dataset.select([i for i, length in enumerate(lengths) if length <= limit])
