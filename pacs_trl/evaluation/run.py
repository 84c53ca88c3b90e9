"""Evaluation of a checkpoint: sample, grade, and write results.json.

Samples are stored in `OUTPUT_DIR/samples/BENCHMARK.jsonl` as they are generated, grades in
`OUTPUT_DIR/grades/BENCHMARK.json`, counts and pass@k in `OUTPUT_DIR/results.json`. Running the same command again
generates only what is missing; raising `n` adds samples. Prompts and grading are those of training.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data import check_chat_template_kwargs, gym, instruction_for
from ..data.messages import MessageCheck
from ..data.prompt_date import prints_date, stored_date, with_date
from ..data.prompts import is_conversation
from ..errors import UserError, without_exit
from ..rewards import configure_verification
from ..settings.names import check_model_path, make_directory, require_vllm
from ..verification import Verifier
from ..verification.code import CodeVerifier
from . import provenance
from .arguments import EvaluationArguments, read_evaluation
from .benchmarks import LoadedBenchmark, load_benchmark
from .engines import identify_model, start_engine
from .grading import check_failures, check_grading, grade_in_background
from .image_requests import load_processor
from .requests import Request, render_prompt, sample_seed
from .results import RESULTS_SCHEMA, GradedSample, check_results_are_kept, summarize, write_results
from .store import SampleStore, digest, evaluation_file, identifying_facts, read_samples


logger = logging.getLogger(__name__)

# Names of directories that many runs have: of checkpoints, of seeds, and of snapshots in the cache of the Hub.
_NAMES_MANY_RUNS = re.compile(
    r"(checkpoint|step|epoch|seed|run)?[-_]?\d+|(final|best|last|latest|merged)?[-_]?(model|checkpoint|adapter|policy)?|"
    r"snapshots|[0-9a-f]{40}",
    re.IGNORECASE,
)


def main(argv: Sequence[str]) -> int:
    """Run `pacs-trl evaluate`: print the share of truncated completions, pass@k, and the path of the results."""
    args, verification = read_evaluation(argv)
    if args.calls_tools:
        configure_verification(verification)  # of tools and rewards
    # Verifiers start their processes when they are first used, which is after all checks.
    with closing(verification.build()) as verifier, closing(verification.build_code()) as code_verifier:
        max_failure_share = verification.verification_max_failure_share
        with without_exit("A tool, an environment, or a reward function"):
            results = evaluate(args, verifier, code_verifier, max_failure_share=max_failure_share)
    for entry in results["benchmarks"].values():
        _print_benchmark(entry)
    print(f"results: {Path(args.output_dir) / 'results.json'}")
    return 0


def _print_benchmark(entry: dict[str, Any]) -> None:
    """Print the results of one benchmark; `entry` is its part of results.json."""
    cells = []
    for k, cell in entry["pass_at_k"].items():
        value, lower, upper = 100 * cell["value"], 100 * cell["lower"], 100 * cell["upper"]
        cells.append(f"pass@{k} {value:.2f} [{lower:.2f}, {upper:.2f}]")
    print(f"{entry['title']}: truncated {100 * entry['truncated_share']:.1f} %  {'  '.join(cells)}")
    if entry["ungraded"]:
        print(f"  {entry['ungraded']} samples could not be graded and are left out of pass@k")
    if entry["excluded"]:
        numbers = ", ".join(f"{number} for k={k}" for k, number in entry["excluded"].items())
        print(f"  problems with fewer than k graded samples, which are excluded from pass@k: {numbers}")
    if "programs" in entry:
        print(f"  programs ran with {entry['programs']['confinement']}")


def evaluate(
    args: EvaluationArguments,
    verifier: Verifier,
    code_verifier: CodeVerifier | None = None,
    *,
    max_failure_share: float = 0.5,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Sample and grade completions; write and return the results.

    Args:
        args ([`EvaluationArguments`]): Model, benchmarks, and sampling settings.
        verifier ([`~pacs_trl.verification.Verifier`]): Grades math answers; use that of training for comparable
            numbers.
        code_verifier ([`~pacs_trl.verification.code.CodeVerifier`], *optional*): Runs the programs of code benchmarks.
        max_failure_share (`float`): Largest share of a benchmark's completions, in [0, 1], that may be impossible to
            verify.
        progress (`bool`): Whether to show a progress bar on a terminal.

    Returns:
        `dict`: The content of results.json: settings, provenance, and an entry per benchmark in `benchmarks`.

    Raises:
        `ValueError`: before the model is loaded, if an argument, a benchmark, the model, or a store is rejected; after
            grading, if more than `max_failure_share` of a benchmark could not be verified.
    """
    # Arguments, benchmarks, and prompts are checked before anything is written or loaded.
    args.warn_of_ignored_settings()
    if args.engine != "server":
        check_model_path(args.model)
    benchmarks = load_benchmarks(args)
    model = identify_model(args)
    _warn_of_equal_samples(args, benchmarks)
    if code_verifier is None:
        code_verifier = CodeVerifier()
    check_grading(benchmarks, verifier, code_verifier)
    tokenizer = None  # a server has its own
    if args.engine != "server":
        tokenizer = _load_tokenizer(args)
    with_conversations = [benchmark.name for benchmark in benchmarks if _has_conversations(args, benchmark)]
    if tokenizer is not None and with_conversations:
        _check_chat_template(args, tokenizer, with_conversations)
    tokenizer_of_tools, tools = None, None
    if args.calls_tools:
        _check_conversations(benchmarks)
        from .conversations import ConversationEngine, load_tools  # imports TRL's trainer

        tokenizer_of_tools, tools = load_tools(args)
    make_directory(args.output_dir, "output_dir")
    results_file = Path(args.output_dir) / "results.json"
    check_results_are_kept(results_file, [benchmark.name for benchmark in benchmarks])

    entries: dict[str, Any] = {}
    settings_not_sent: set[str] = set()
    with ExitStack() as stack:
        stores = [stack.enter_context(_open_store(args, model, benchmark)) for benchmark in benchmarks]
        requests = [
            requests_to_generate(args, benchmark, store.keys)
            for benchmark, store in zip(benchmarks, stores, strict=True)
        ]
        # Prompts are rendered with these arguments; stored and published are those of the user.
        prompt_args = _with_stored_date(args, tokenizer)
        prompt_digest = _prompt_digest(prompt_args, tokenizer, is_template_used=bool(with_conversations))
        engine = None  # which is not needed if all samples are stored
        if any(requests):
            if args.engine == "vllm":
                require_vllm("sample with `--engine transformers`")
            _check_messages(prompt_args, tokenizer, benchmarks, requests, tools)
            engine = start_engine(prompt_args)
            stack.callback(engine.close)

        for benchmark, store, to_generate in zip(benchmarks, stores, requests, strict=True):
            benchmark_engine = engine
            if engine is not None and tools is not None:
                benchmark_engine = ConversationEngine(engine, tokenizer_of_tools, tools, prompt_args, benchmark)
            grader: Verifier | CodeVerifier = verifier
            if benchmark.is_gym:
                grader = stack.enter_context(replace(verifier, protocol="reasoning_gym"))
            elif benchmark.is_code:
                grader = code_verifier
            shows_bar = progress and bool(to_generate)
            # `disable=None` hides the bar unless the output is a terminal
            bar = tqdm(total=len(to_generate), desc=benchmark.title, disable=None if shows_bar else True)
            records = _stored_and_generated(args, store, to_generate, benchmark_engine, bar)
            records = _collect_settings_not_sent(records, settings_not_sent)
            graded, num_by_outcome = grade_in_background(grader, benchmark.problems, records)
            check_failures(benchmark.title, grader, num_by_outcome, max_failure_share)
            entry = {
                "title": benchmark.title,
                "source": benchmark.source,
                "instruction": _instruction_of(args, benchmark),
                "verification": dict(num_by_outcome),
                **summarize([problem.id for problem in benchmark.problems], graded.values(), args.ks),
            }
            if benchmark.is_code:
                entry["programs"] = code_verifier.facts()
            entries[benchmark.name] = entry
            _write_grades(args, benchmark, graded)

    results = _results(args, model, prompt_digest, verifier, entries)
    if settings_not_sent:
        results["engine"]["settings_not_sent"] = sorted(settings_not_sent)
    check_results_are_kept(results_file, list(entries))  # of an evaluation that ran beside this one
    write_results(results_file, results)
    return results


def _warn_of_equal_samples(args: EvaluationArguments, benchmarks: Sequence[LoadedBenchmark]) -> None:
    """Warn if greedy decoding generates the same completion for all samples of a problem. Samples of a problem with
    options differ in their order, and those with tools and environments in what these return."""
    if args.temperature > 0 or args.n == 1 or args.calls_tools:
        return
    titles = []
    for benchmark in benchmarks:
        if not any(problem.options for problem in benchmark.problems):
            titles.append(benchmark.title)
    if titles:
        logger.warning(
            f"temperature=0 generates {args.n} equal completions for each problem of {', '.join(titles)}, so pass@k "
            "is pass@1. Set n: 1, or a temperature above 0."
        )


def _check_chat_template(args: EvaluationArguments, tokenizer: Any, with_conversations: Sequence[str]) -> None:
    """Raise a `ValueError` if the tokenizer has no chat template, which the benchmarks `with_conversations` need, or
    the template does not read one of `chat_template_kwargs`."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{', '.join(with_conversations)} has messages as prompts, and {args.model} has no chat template. "
            "Evaluate a model with one, or write whole prompts as text into a column `prompt`."
        )
    check_chat_template_kwargs(tokenizer, args.chat_template_kwargs)


def _check_conversations(benchmarks: Sequence[LoadedBenchmark]) -> None:
    """Raise a `ValueError` if tools cannot be called in the prompts of a benchmark."""
    for benchmark in benchmarks:
        if benchmark.has_images:
            raise UserError(f"{benchmark.title}: tools are not called in prompts with images. Remove the tools.")
        if benchmark.is_prompt and not all(is_conversation(problem.problem) for problem in benchmark.problems):
            raise UserError(
                f"{benchmark.title} has prompts that are text, to which no chat template adds tools. Write them as "
                "messages, or remove tools and environment."
            )


def load_benchmarks(args: EvaluationArguments) -> list[LoadedBenchmark]:
    """Load the benchmarks named by the arguments; each may be named once."""
    columns = {}
    if args.problem_column is not None:
        columns["problem_column"] = args.problem_column
    if args.solution_column is not None:
        columns["solution_column"] = args.solution_column
    benchmarks = [
        load_benchmark(spec, max_problems=args.max_problems, columns=columns, gym_tasks=args.reasoning_gym)
        for spec in args.benchmark_specs
    ]
    names = [benchmark.name for benchmark in benchmarks]
    unused = []
    for task in args.reasoning_gym or {}:
        if f"{gym.NAME}/{task}" not in names:
            unused.append(f"reasoning_gym: {task}")
    # `source` of a file of the user has the columns that were named for it
    reads_columns = any(columns.keys() <= benchmark.source.keys() for benchmark in benchmarks)
    if columns and not reads_columns:
        unused += columns
    if unused:
        pronoun = "it" if len(unused) == 1 else "them"
        specs = ", ".join(args.benchmark_specs)
        raise UserError(f"{' and '.join(unused)} would be ignored by benchmarks {specs}. Remove {pronoun}.")
    if len(set(names)) < len(names):
        raise UserError(f"benchmarks contains a name twice: {', '.join(names)}. Name each benchmark once.")
    return benchmarks


def requests_to_generate(
    args: EvaluationArguments, benchmark: LoadedBenchmark, stored: set[tuple[str, int]]
) -> list[Request]:
    """
    Return the requests of a benchmark whose samples are missing, in the order of its problems.

    With the transformers engine they come with the stored ones of their batches. Rounding in a forward pass depends on
    the other completions of the batch, and can change a token. A batch with one missing sample is therefore generated
    as a whole, and that sample is the one of an uninterrupted run.

    Args:
        stored (`set`): (problem id, sample number) of the samples that exist.
    """
    requests = []
    for problem in benchmark.problems:
        for sample in range(args.n):
            seed = sample_seed(args.seed, f"{benchmark.name}/{problem.id}", sample)
            question, _ = problem.for_seed(seed)
            prompt = problem.with_images(args.prompt_of(question, benchmark))
            requests.append(Request(problem.id, sample, seed, prompt))
    batch_size = 1
    if args.engine == "transformers":
        batch_size = args.batch_size
    to_generate: list[Request] = []
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        if any((request.problem_id, request.sample) not in stored for request in batch):
            to_generate += batch
    return to_generate


def _load_tokenizer(args: EvaluationArguments) -> Any:
    from ..data.text_tokenizer import load_text_tokenizer  # imports transformers, which `--help` does not need

    return load_text_tokenizer(args.model, **args.loading)


def _has_conversations(args: EvaluationArguments, benchmark: LoadedBenchmark) -> bool:
    """Return whether a prompt of a benchmark is a list of messages, to which a chat template is applied."""
    for problem in benchmark.problems:
        question, _ = problem.for_seed(args.seed)  # a list of messages, or text, with any seed
        if is_conversation(args.prompt_of(question, benchmark)):
            return True
    return False


def _with_stored_date(args: EvaluationArguments, tokenizer: Any) -> EvaluationArguments:
    """Return arguments whose prompts have the date of the first samples in `output_dir`, if the chat template prints
    one. A server (`tokenizer` is `None`) has its own chat template."""
    if tokenizer is None or not prints_date(tokenizer.chat_template):
        return args
    date = stored_date(Path(args.output_dir))
    dated_kwargs = with_date(args.chat_template_kwargs, lambda: date)
    return replace(args, chat_template_kwargs=dated_kwargs)


def _check_messages(
    args: EvaluationArguments,
    tokenizer: Any,
    benchmarks: Sequence[LoadedBenchmark],
    requests: Sequence[Sequence[Request]],
    tools: Sequence[Any] | None,
) -> None:
    """Raise a `ValueError` if the text of a message would not reach the prompt. A server has its own chat template."""
    if tokenizer is None:
        return
    message_check = MessageCheck(tokenizer, args.chat_template_kwargs, tools)
    for benchmark, requests_of_benchmark in zip(benchmarks, requests, strict=True):
        if benchmark.has_images and requests_of_benchmark:  # whose processor is loaded before the model
            processor = load_processor(args.model, **args.loading)
            message_check = MessageCheck(processor, args.chat_template_kwargs, tools)
        for request in requests_of_benchmark:
            if is_conversation(request.prompt):
                message_check.check_prompt(f"Problem {request.problem_id} of {benchmark.title}", request.prompt)


def _open_store(args: EvaluationArguments, model: dict[str, Any], benchmark: LoadedBenchmark) -> SampleStore:
    """Open the samples of a benchmark. Raises a `ValueError` if the stored ones have other settings."""
    settings = {
        "model": identifying_facts(model),
        "benchmark": {
            "name": benchmark.name,
            "version": benchmark.source["version"],
            "digest": benchmark.source["digest"],
        },
        "prompt": _prompt_facts(args) | {"instruction": instruction_for(benchmark, args.prompt_instruction)},
        "sampling": asdict(args.sampling),
        "seed": args.seed,
        # Completions of the transformers engine depend on their batch; see engines.py.
        "engine": {
            "name": args.engine,
            "dtype": args.dtype,
            "batch_size": args.batch_size if args.engine == "transformers" else None,
        },
    }
    return SampleStore(evaluation_file(args.output_dir, "samples", benchmark.name), settings)


def _stored_and_generated(
    args: EvaluationArguments, store: SampleStore, to_generate: Sequence[Request], engine: Any, bar: tqdm
) -> Iterator[dict[str, Any]]:
    """Yield the records of stored samples, then those of missing samples as they are generated and stored. `engine` is
    `None` if no sample is missing."""
    for record in read_samples(store.path):
        if record["sample"] < args.n:
            yield record
    with bar:
        if not to_generate:
            return
        for request, completion in engine.generate(to_generate, args.sampling):
            if (request.problem_id, request.sample) not in store.keys:
                yield store.append(request, completion)
            bar.update()


def _collect_settings_not_sent(
    records: Iterator[dict[str, Any]], settings_not_sent: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the records, and add to `settings_not_sent` the neutral settings that a server rejected."""
    for record in records:
        settings_not_sent.update(record.get("settings_not_sent", ()))
        yield record


def _write_grades(
    args: EvaluationArguments, benchmark: LoadedBenchmark, graded: dict[tuple[str, int], GradedSample]
) -> None:
    """Write one character per sample, in order: 1 correct, 0 wrong (or a label below 1), - not gradable."""
    grades = {}
    for problem in benchmark.problems:
        samples = [graded[problem.id, number] for number in range(args.n)]
        grades[problem.id] = "".join(_grade_character(sample.outcome) for sample in samples)
    path = evaluation_file(args.output_dir, "grades", benchmark.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grades, indent=0) + "\n", encoding="utf-8")


def _grade_character(outcome: float | None) -> str:
    if outcome is None:
        return "-"
    return "1" if outcome == 1.0 else "0"


def _results(
    args: EvaluationArguments, model: dict, prompt_digest: str, verifier: Verifier, entries: dict
) -> dict[str, Any]:
    """Return the content of results.json; `entries` are those of the benchmarks, by name."""
    label = args.method
    if not label:
        label = default_label(model["name"] if args.engine == "server" else args.model)
    engine: dict[str, Any] = {"name": args.engine, "dtype": args.dtype}
    if args.engine == "transformers":
        engine["batch_size"] = args.batch_size
    elif args.engine == "vllm":
        engine["tensor_parallel_size"] = args.tensor_parallel_size
    return {
        "schema_version": RESULTS_SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": label,
        "method_is_default": not args.method,
        "model": model,
        "n": args.n,
        "k": args.ks,
        "seed": args.seed,
        "protocol": {
            "sampling": asdict(args.sampling),
            "prompt": _prompt_facts(args),
            "verifier": {
                "name": "math_verify",
                "version": provenance.versions()["math-verify"],
                "protocol": verifier.protocol,
                "cpu_seconds": verifier.cpu_seconds,
                "grade_truncated": verifier.grade_truncated,
            },
        },
        "prompt_digest": prompt_digest,
        "engine": engine,
        "benchmarks": entries,
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "commit": provenance.source_commit(),
    }


def default_label(model: str) -> str:
    """Return the label of a model in tables: the name of a Hub id, or that of a directory, with the directories
    around it as far as names like `checkpoint-100` or `seed-0` tell no runs apart. Labels are published: directories
    around the working directory, such as the home of a user, are no part of them, unless a relative path names
    them."""
    if not Path(model).is_dir():
        return model.split("/")[-1]
    path = Path(os.path.abspath(model))  # with symbolic links, such as one from the working directory to a large disk
    if path.is_relative_to(Path.cwd()):
        parts = path.relative_to(Path.cwd()).parts
    elif Path(model).is_absolute():
        parts = ()
    else:
        parts = tuple(part for part in Path(model).parts if part != os.pardir)
    if not parts:  # outside of the working directory, or that directory
        parts = path.parts[-1:]
    names: list[str] = []
    for name in reversed(parts):
        names.insert(0, name)
        if not _NAMES_MANY_RUNS.fullmatch(name):
            break
    return "/".join(names)


def _prompt_facts(args: EvaluationArguments) -> dict[str, Any]:
    """Return the settings of prompts, which samples and results are compared by."""
    facts: dict[str, Any] = {
        "instruction": args.prompt_instruction,
        "system_prompt": args.system_prompt,
        "chat_template_kwargs": args.chat_template_kwargs,
    }
    if args.calls_tools:
        facts["tools"] = args.tools
        facts["max_tool_calling_iterations"] = args.max_tool_calling_iterations
    return facts


def _instruction_of(args: EvaluationArguments, benchmark: LoadedBenchmark) -> str | None:
    """Return the sentence that is appended to the problems of a benchmark; `None` if they are whole prompts."""
    if benchmark.is_prompt or all(is_conversation(problem.problem) for problem in benchmark.problems):
        return None
    return instruction_for(benchmark, args.prompt_instruction)


def _prompt_digest(args: EvaluationArguments, tokenizer: Any, *, is_template_used: bool) -> str:
    """Hash the rendered prompt of one fixed problem: its messages where a server applies the chat template
    (`tokenizer` is `None`), and its text where all prompts are text."""
    problem = "What is $1 + 1$?"
    if not is_template_used:
        return digest({"text": problem})
    messages = args.prompt_of(problem)
    if tokenizer is None:
        return digest({"messages": messages})
    return digest({"text": render_prompt(tokenizer, messages, args.chat_template_kwargs)})
