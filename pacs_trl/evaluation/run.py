"""Evaluation of a checkpoint: sample, grade, and write results.json.

Samples are stored in `OUTPUT_DIR/samples/BENCHMARK.jsonl` as they are generated, grades in
`OUTPUT_DIR/grades/BENCHMARK.json`, counts and pass@k in `OUTPUT_DIR/results.json`. Running the same command again
generates only what is missing; raising `n` adds samples. Prompts and grading are those of training.
"""

import json
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data import check_chat_template_kwargs, gym, instruction_for
from ..data.golds import report_golds
from ..data.messages import MessageCheck
from ..data.prompt_date import prints_date, stored_date, with_date
from ..data.prompts import is_conversation
from ..errors import UserError, without_exit
from ..rewards import configure_verification
from ..settings.names import check_model_path, make_directory, require_vllm
from ..verification import Outcome, Verifier
from ..verification.code import CodeVerifier
from . import provenance
from .arguments import EvaluationArguments, read_evaluation
from .benchmarks import LoadedBenchmark, Problem, load_benchmark
from .engines import identify_model, load_processor, start_engine
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
CHUNK_SIZE = 128  # completions graded per call of the verifier
MAX_WAITING = 32  # chunks in the queue: bounds memory when stored completions are read faster than graded


def main(argv: Sequence[str]) -> int:
    """Run `pacs-trl evaluate`: print the share of truncated completions, pass@k, and the path of the results."""
    args, verification = read_evaluation(argv)
    if args.calls_tools:
        configure_verification(verification)  # of tools and rewards
    # they start their processes when they are first used, which is after all checks
    with closing(verification.build()) as verifier, closing(verification.build_code()) as code_verifier:
        share = verification.verification_max_failure_share
        with without_exit("A tool, an environment, or a reward function"):
            results = evaluate(args, verifier, code_verifier, max_failure_share=share)
    for entry in results["benchmarks"].values():
        line = "  ".join(
            f"pass@{k} {100 * v['value']:.2f} [{100 * v['lower']:.2f}, {100 * v['upper']:.2f}]"
            for k, v in entry["pass_at_k"].items()
        )
        print(f"{entry['title']}: truncated {100 * entry['truncated_share']:.1f} %  {line}")
        if entry["ungraded"]:
            print(f"  {entry['ungraded']} samples could not be graded and are left out of pass@k")
        if entry["excluded"]:
            numbers = ", ".join(f"{number} for k={k}" for k, number in entry["excluded"].items())
            print(f"  problems with fewer than k graded samples, which are excluded from pass@k: {numbers}")
        if "programs" in entry:
            print(f"  programs ran with {entry['programs']['confinement']}")
    print(f"results: {Path(args.output_dir) / 'results.json'}")
    return 0


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
        max_failure_share (`float`): Largest share of a benchmark's completions that may be impossible to verify.
        progress (`bool`): Whether to show a progress bar on a terminal.

    Raises:
        `ValueError`: before the model is loaded, if an argument, a benchmark, the model, or a store is rejected; after
            grading, if more than `max_failure_share` of a benchmark could not be verified.
    """
    args.warn_of_ignored_settings()
    if args.engine != "server":
        check_model_path(args.model)
    benchmarks, model = load_benchmarks(args), identify_model(args)
    _warn_of_equal_samples(args, benchmarks)
    code_verifier = code_verifier or CodeVerifier()
    check_grading(benchmarks, verifier, code_verifier)
    tokenizer = None if args.engine == "server" else _load_tokenizer(args)
    needs_template = [benchmark.name for benchmark in benchmarks if _has_conversations(args, benchmark)]
    if tokenizer is not None and tokenizer.chat_template is None and needs_template:
        raise UserError(
            f"{', '.join(needs_template)} has messages as prompts, and {args.model} has no chat template. Evaluate a "
            "model with one, or write whole prompts as text into a column `prompt`."
        )
    if tokenizer is not None and needs_template:
        check_chat_template_kwargs(tokenizer, args.chat_template_kwargs)
    tools = None
    if args.calls_tools:
        _check_conversations(benchmarks)
        from .conversations import ConversationEngine, load_tools  # imports TRL's trainer

        tools = load_tools(args)
    make_directory(args.output_dir, "output_dir")
    results_file = Path(args.output_dir) / "results.json"
    check_results_are_kept(results_file, [benchmark.name for benchmark in benchmarks])
    entries: dict[str, Any] = {}
    settings_not_sent: set[str] = set()
    with ExitStack() as stack:
        stores = [stack.enter_context(_open_store(args, model, benchmark)) for benchmark in benchmarks]
        requests = [requests_to_generate(args, b, store.keys) for b, store in zip(benchmarks, stores, strict=True)]
        # Prompts are rendered with these arguments; stored and published are those of the user.
        prompt_args = _with_stored_date(args, tokenizer)
        prompt_digest = _prompt_digest(prompt_args, tokenizer, is_template_used=bool(needs_template))
        engine = None
        if any(requests):
            if args.engine == "vllm":
                require_vllm("sample with `--engine transformers`")
            _check_messages(prompt_args, tokenizer, benchmarks, requests, tools[1] if tools else None)
            engine = start_engine(prompt_args)
            stack.callback(engine.close)
        for benchmark, store, to_generate in zip(benchmarks, stores, requests, strict=True):
            grader = code_verifier if benchmark.is_code else verifier
            if benchmark.is_gym:
                grader = stack.enter_context(replace(verifier, protocol="reasoning_gym"))
            bar = tqdm(
                total=len(to_generate), desc=benchmark.title, disable=None if progress and to_generate else True
            )
            generator = ConversationEngine(engine, *tools, prompt_args, benchmark) if engine and tools else engine
            records = _records(args, store, to_generate, generator, bar)
            records = _collect_settings_not_sent(records, settings_not_sent)
            graded, outcomes = grade_in_background(grader, benchmark.problems, records)
            _check_failures(benchmark.title, grader.FAILURES, outcomes, max_failure_share)
            entries[benchmark.name] = {
                "title": benchmark.title,
                "source": benchmark.source,
                "instruction": _instruction_of(args, benchmark),
                "verification": dict(outcomes),
                **summarize([problem.id for problem in benchmark.problems], graded.values(), args.ks),
            }
            if benchmark.is_code:
                entries[benchmark.name]["programs"] = code_verifier.facts()
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
    titles = [b.title for b in benchmarks if not any(problem.options for problem in b.problems)]
    if titles:
        logger.warning(
            f"temperature=0 generates {args.n} equal completions for each problem of {', '.join(titles)}, so pass@k "
            "is pass@1. Set n: 1, or a temperature above 0."
        )


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
    unused = [f"reasoning_gym: {task}" for task in args.reasoning_gym or {} if f"{gym.NAME}/{task}" not in names]
    if columns and not any(columns.keys() <= benchmark.source.keys() for benchmark in benchmarks):
        unused += columns
    if unused:
        them = "them" if len(unused) > 1 else "it"
        specs = ", ".join(args.benchmark_specs)
        raise UserError(f"{' and '.join(unused)} would be ignored by benchmarks {specs}. Remove {them}.")
    if len(set(names)) < len(names):
        raise UserError(f"benchmarks contains a name twice: {', '.join(names)}. Name each benchmark once.")
    return benchmarks


def check_grading(benchmarks: Sequence[LoadedBenchmark], verifier: Verifier, code_verifier: CodeVerifier) -> None:
    """Start the sandbox if a benchmark needs it, which fails where it is unavailable, and report unreadable golds."""
    if any(benchmark.is_code or benchmark.is_gym for benchmark in benchmarks):
        code_verifier.start()
    for benchmark in (b for b in benchmarks if not (b.is_code or b.environment or b.is_gym)):
        ids, golds = [p.id for p in benchmark.problems], [p.solution for p in benchmark.problems]
        report_golds(benchmark.title, golds, verifier, ids)


def requests_to_generate(
    args: EvaluationArguments, benchmark: LoadedBenchmark, stored: set[tuple[str, int]]
) -> list[Request]:
    """Return the requests that are not stored, with the transformers engine also the stored ones of their batches."""
    requests = []
    for problem in benchmark.problems:
        for sample in range(args.n):
            seed = sample_seed(args.seed, f"{benchmark.name}/{problem.id}", sample)
            prompt = problem.with_images(args.prompt_of(problem.for_seed(seed)[0], benchmark))
            requests.append(Request(problem.id, sample, seed, prompt))
    # Rounding in a forward pass depends on the other completions of the batch, and can change a token. A batch with
    # one missing sample is therefore generated as a whole, and that sample is the one of an uninterrupted run.
    batch_size = args.batch_size if args.engine == "transformers" else 1
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
    prompts = (args.prompt_of(problem.for_seed(args.seed)[0], benchmark) for problem in benchmark.problems)
    return any(is_conversation(prompt) for prompt in prompts)


def _with_stored_date(args: EvaluationArguments, tokenizer: Any) -> EvaluationArguments:
    """Return arguments whose prompts have the date of the first samples in `output_dir`, if the chat template prints
    one. A server (`tokenizer` is `None`) has its own chat template."""
    if tokenizer is None or not prints_date(tokenizer.chat_template):
        return args
    date = stored_date(Path(args.output_dir))
    return replace(args, chat_template_kwargs=with_date(args.chat_template_kwargs, lambda: date))


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
    messages = MessageCheck(tokenizer, args.chat_template_kwargs, tools)
    for benchmark, requests_of_benchmark in zip(benchmarks, requests, strict=True):
        if benchmark.has_images and requests_of_benchmark:  # whose processor is loaded before the model
            processor = load_processor(args.model, **args.loading)
            messages = MessageCheck(processor, args.chat_template_kwargs, tools)
        for request in requests_of_benchmark:
            if is_conversation(request.prompt):
                messages.check_prompt(f"Problem {request.problem_id} of {benchmark.title}", request.prompt)


def _open_store(args: EvaluationArguments, model: dict[str, Any], benchmark: LoadedBenchmark) -> SampleStore:
    settings = {
        "model": identifying_facts(model),
        "benchmark": {"name": benchmark.name, **{key: benchmark.source[key] for key in ("version", "digest")}},
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


def _records(
    args: EvaluationArguments, store: SampleStore, to_generate: Sequence[Request], engine: Any, bar: tqdm
) -> Iterator[dict[str, Any]]:
    """Yield the stored samples, then those that are missing as they are generated and stored."""
    for record in read_samples(store.path):
        if record["sample"] < args.n:
            yield record
    with bar:
        for request, completion in engine.generate(to_generate, args.sampling) if to_generate else ():
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


def grade_in_background(
    verifier: Verifier | CodeVerifier, problems: Sequence[Problem], records: Iterator[dict[str, Any]]
) -> tuple[dict[tuple[str, int], GradedSample], Counter[str]]:
    """Grade a chunk of records while the engine generates the next; return graded samples by (problem, sample), and
    the number of each outcome (correct, wrong, no_answer, timeout, ...)."""
    by_id = {problem.id: problem for problem in problems}
    graded: dict[tuple[str, int], GradedSample] = {}
    outcomes: Counter[str] = Counter()

    def grade(chunk: list[dict[str, Any]]) -> None:
        is_rewarded = "reward" in chunk[0]  # by an environment, as all samples of its benchmark
        chunk_outcomes = _reward_outcomes(chunk) if is_rewarded else _verify(verifier, chunk, by_id)
        for record, outcome in zip(chunk, chunk_outcomes, strict=True):
            outcomes[outcome.name.lower()] += 1
            graded[record["problem"], record["sample"]] = GradedSample(
                problem=record["problem"],
                outcome=outcome.label,
                num_tokens=record["num_tokens"],
                finish_reason=record["finish_reason"],
            )

    waiting: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        while chunk := list(islice(records, CHUNK_SIZE)):
            waiting.append(pool.submit(grade, chunk))
            if len(waiting) > MAX_WAITING:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return graded, outcomes


def _verify(
    verifier: Verifier | CodeVerifier, records: Sequence[dict[str, Any]], problems: Mapping[str, Problem]
) -> list[Outcome]:
    """Return the outcomes of the completions of records; `problems` are by id."""
    completions = [record["completion"] for record in records]
    solutions = [problems[record["problem"]].for_seed(record["seed"])[1] for record in records]
    truncated = [record["finish_reason"] == "length" for record in records]
    return [graded.outcome for graded in verifier.grade_detailed(completions, solutions, truncated)]


def _reward_outcomes(records: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Return the outcomes that the rewards of an environment mean: 1 or more is correct, `None` is not gradable."""
    outcomes = []
    for record in records:
        reward = record["reward"]
        if reward is None:
            outcomes.append(Outcome.GOLD_UNPARSEABLE)
        else:
            outcomes.append(Outcome.CORRECT if reward >= 1 else Outcome.WRONG)
    return outcomes


def _check_failures(title: str, kinds: frozenset[Outcome], outcomes: Counter[str], max_share: float) -> None:
    failures = {o.name.lower(): outcomes[o.name.lower()] for o in kinds if outcomes[o.name.lower()]}
    if sum(failures.values()) > max_share * outcomes.total():
        raise UserError(
            f"{title}: {failures} of {outcomes.total()} completions could not be verified, more than "
            f"verification_max_failure_share={max_share}. The samples are stored: check the gold answers and the "
            "verification limits, or raise the share, and run the same command again."
        )


def _write_grades(
    args: EvaluationArguments, benchmark: LoadedBenchmark, graded: dict[tuple[str, int], GradedSample]
) -> None:
    """Write one character per sample, in order: 1 correct, 0 wrong (or a label below 1), - not gradable."""
    grades = {}
    for problem in benchmark.problems:
        outcomes = [graded[problem.id, sample].outcome for sample in range(args.n)]
        grades[problem.id] = "".join("-" if o is None else "1" if o == 1.0 else "0" for o in outcomes)
    path = evaluation_file(args.output_dir, "grades", benchmark.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grades, indent=0) + "\n", encoding="utf-8")


def _results(
    args: EvaluationArguments, model: dict, prompt_digest: str, verifier: Verifier, entries: dict
) -> dict[str, Any]:
    engine_keys = {"transformers": ("batch_size",), "vllm": ("tensor_parallel_size",)}.get(args.engine, ())
    return {
        "schema_version": RESULTS_SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": args.method or default_label(model["name"] if args.engine == "server" else args.model),
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
        "engine": {"name": args.engine, "dtype": args.dtype} | {key: getattr(args, key) for key in engine_keys},
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
    names: list[str] = []
    for name in reversed(parts or path.parts[-1:]):
        names.insert(0, name)
        if not _NAMES_MANY_RUNS.fullmatch(name):
            break
    return "/".join(names)


def _prompt_facts(args: EvaluationArguments) -> dict[str, Any]:
    return {
        "instruction": args.prompt_instruction,
        "system_prompt": args.system_prompt,
        "chat_template_kwargs": args.chat_template_kwargs,
        **({key: getattr(args, key) for key in ("tools", "max_tool_calling_iterations")} if args.calls_tools else {}),
    }


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
