"""Evaluate a checkpoint: sample, grade, count, and write results.json.

Samples go to `OUTPUT_DIR/samples/BENCHMARK.jsonl` as they are generated, grades to `OUTPUT_DIR/grades/BENCHMARK.json`,
counts and pass@k to `OUTPUT_DIR/results.json`. Running the same command again generates only what is missing; raising
`n` adds samples. Prompts and grading are those of training.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..data import instruction_for
from ..data.sets import MINIATURE, report_unreadable_golds
from ..data.tasks import check_task
from ..settings.names import check_model_path, require_vllm
from ..verification import Outcome, Verifier
from ..verification.code import CodeVerifier
from . import provenance
from .arguments import EvaluationArguments, read_evaluation
from .benchmarks import LoadedBenchmark, load_benchmark
from .engines import TransformersEngine, engine_facts, identify_model, start_engine
from .grading import grade_in_background
from .requests import Request, render_prompt, sample_seed
from .results import RESULTS_SCHEMA, GradedSample, summarize, write_results
from .store import SampleStore, digest, evaluation_file, read_samples


logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run `pacs-trl evaluate`: print the share of truncated completions, pass@k, and the file of the results."""
    args, verification = read_evaluation(argv)
    args = _with_warm_start(args)
    with verification.build() as verifier, closing(verification.build_code()) as code_verifier:
        share = verification.verification_max_failure_share
        results = evaluate(args, verifier, code_verifier, max_failure_share=share)
    for entry in results["benchmarks"].values():
        line = "  ".join(
            f"pass@{k} {100 * v['value']:.2f} [{100 * v['lower']:.2f}, {100 * v['upper']:.2f}]"
            for k, v in entry["pass_at_k"].items()
        )
        print(f"{entry['title']}: truncated {100 * entry['truncated_share']:.1f} %  {line}")
        if "programs" in entry:
            print(f"  programs ran with {entry['programs']['confinement']}")
    print(f"results: {Path(args.output_dir) / 'results.json'}")
    return 0


def _with_warm_start(args: EvaluationArguments) -> EvaluationArguments:
    """Replace `miniature/<task>` by the checkpoint that training starts from under this name."""
    if not args.model.startswith(MINIATURE) or args.engine == "server":
        return args
    check_task(args.model.removeprefix(MINIATURE).partition("/")[0])
    if args.engine == "vllm":
        require_vllm("sample with `--engine transformers`")
    load_benchmarks(args)  # refuses wrong ones before the warm start is trained
    # `miniature` is above this folder: it evaluates what it trains
    warm_start = import_module("pacs_trl.miniature.warm_start").warm_start
    return replace(args, model=str(warm_start(args.model.removeprefix(MINIATURE))), method=args.method or "warm start")


def evaluate(
    args: EvaluationArguments,
    verifier: Verifier,
    code_verifier: CodeVerifier | None = None,
    *,
    max_failure_share: float = 0.5,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Sample, grade and count; write and return the results.

    Args:
        args ([`EvaluationArguments`]): What to evaluate and how to sample.
        verifier ([`~pacs_trl.verification.Verifier`]): Grades; the one of training, for comparable numbers.
        code_verifier ([`~pacs_trl.verification.code.CodeVerifier`], *optional*): Runs the programs of code benchmarks.
        max_failure_share (`float`): Refuse a benchmark of which more than this share could not be verified.
        progress (`bool`): Whether to show a progress bar on a terminal.

    Raises:
        `ValueError`: before any model is loaded, if an argument, a benchmark, the model or a store does not fit; after
            grading, if too much of a benchmark could not be verified.
    """
    started = time.perf_counter()
    if args.engine != "server":
        check_model_path(args.model)
    benchmarks = load_benchmarks(args)
    code_verifier = code_verifier or CodeVerifier()
    if any(benchmark.is_code for benchmark in benchmarks):
        code_verifier.start()  # refused now, not after sampling
    model = identify_model(args)
    for benchmark in (b for b in benchmarks if not b.is_code):
        ids, golds = [p.id for p in benchmark.problems], [p.solution for p in benchmark.problems]
        report_unreadable_golds(benchmark.title, golds, verifier, ids)
    entries: dict[str, Any] = {}
    with ExitStack() as stack:
        stores = [stack.enter_context(_open_store(args, model, benchmark)) for benchmark in benchmarks]
        requests = [missing_requests(args, b, store.keys) for b, store in zip(benchmarks, stores, strict=True)]
        engine = None
        if any(requests):
            engine = start_engine(args)
            stack.callback(engine.close)
        for benchmark, store, missing in zip(benchmarks, stores, requests, strict=True):
            grading = code_verifier if benchmark.is_code else verifier
            bar = tqdm(total=len(missing), desc=benchmark.title, disable=None if progress and missing else True)
            records = _records(args, store, missing, engine, bar)
            graded, outcomes = grade_in_background(grading, benchmark.problems, records)
            _check_failures(benchmark, outcomes, max_failure_share)
            entries[benchmark.name] = {
                "title": benchmark.title,
                "source": benchmark.source,
                "verification": dict(outcomes),
                **summarize([problem.id for problem in benchmark.problems], graded.values(), args.ks),
            }
            if benchmark.is_code:
                entries[benchmark.name]["programs"] = code_verifier.facts()
            _write_grades(args, benchmark, graded)
    if args.token_entropy_samples:
        _add_token_entropy(args, benchmarks, entries)
    timing = {"wall_seconds": round(time.perf_counter() - started, 3)}
    results = _results(args, model, verifier, entries) | {"timing": timing}
    write_results(Path(args.output_dir) / "results.json", results)
    return results


def _records(
    args: EvaluationArguments, store: SampleStore, missing: Sequence[Request], engine: Any, bar: tqdm
) -> Iterator[dict[str, Any]]:
    """The stored samples, then those that are missing as they are generated and stored."""
    for record in read_samples(store.path):
        if record["sample"] < args.n:
            yield record
    with bar:
        for request, completion in engine.generate(missing, args.sampling) if missing else ():
            if (request.problem_id, request.sample) not in store.keys:
                yield store.append(request.problem_id, request.sample, request.seed, *completion)
            bar.update()


def _results(args: EvaluationArguments, model: dict, verifier: Verifier, entries: dict) -> dict[str, Any]:
    return {
        "schema_version": RESULTS_SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": args.method or model["name"].split("/")[-1],
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
        "prompt_digest": _prompt_digest(args),
        "engine": engine_facts(args),
        "benchmarks": entries,
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "commit": provenance.source_commit(),
    }


def load_benchmarks(args: EvaluationArguments) -> list[LoadedBenchmark]:
    """The benchmarks named by the arguments, each name once."""
    columns = {"problem_column": args.problem_column, "solution_column": args.solution_column}
    given = {key: column for key, column in columns.items() if column is not None}
    specs = [spec.strip() for spec in args.benchmarks.split(",")]
    benchmarks = [load_benchmark(spec, max_problems=args.max_problems, columns=given) for spec in specs]
    if given and not any(given.keys() <= benchmark.source.keys() for benchmark in benchmarks):
        raise ValueError(
            f"{' and '.join(given)} would be ignored: {args.benchmarks} names no file of your own. Leave it out."
        )
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"benchmarks names one twice: {', '.join(names)}. Name each benchmark once.")
    return benchmarks


def missing_requests(
    args: EvaluationArguments, benchmark: LoadedBenchmark, stored: set[tuple[str, int]]
) -> list[Request]:
    """Requests that are not stored, in whole groups of the engine: a group with a missing sample is generated again,
    as it was before."""
    requests = []
    for problem in benchmark.problems:
        for sample in range(args.n):
            seed = sample_seed(args.seed, f"{benchmark.name}/{problem.id}", sample)
            prompt = args.prompt_of(problem.of_sample(seed)[0], benchmark)
            requests.append(Request(problem.id, sample, seed, prompt))
    size = args.group_size
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    return [r for group in groups if any((r.problem_id, r.sample) not in stored for r in group) for r in group]


def _prompt_facts(args: EvaluationArguments) -> dict[str, Any]:
    return {
        "instruction": args.prompt_instruction,
        "system_prompt": args.system_prompt,
        "chat_template_kwargs": args.template_kwargs,
    }


def _prompt_digest(args: EvaluationArguments) -> str:
    """Digest of one fixed problem as the model sees it, chat template included unless a server applies it."""
    prompt = args.prompt_of("What is $1 + 1$?")
    if args.engine == "server":
        return digest({"messages": prompt})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, revision=args.revision)
    return digest({"text": render_prompt(tokenizer, prompt, args.template_kwargs)})


def _check_failures(benchmark: LoadedBenchmark, outcomes: Mapping[str, int], max_share: float) -> None:
    kinds = CodeVerifier.FAILURES if benchmark.is_code else [outcome for outcome in Outcome if outcome.is_failure]
    failures = {o.name.lower(): outcomes[o.name.lower()] for o in kinds if outcomes[o.name.lower()]}
    if sum(failures.values()) > max_share * sum(outcomes.values()):
        raise ValueError(
            f"{benchmark.title}: of {sum(outcomes.values())} completions these could not be verified: {failures}, "
            f"more than verification_max_failure_share {max_share}. The samples are kept; check the gold answers and "
            "the verification limits, or raise the share, and run the same command again."
        )


def _open_store(args: EvaluationArguments, model: dict[str, Any], benchmark: LoadedBenchmark) -> SampleStore:
    settings = {
        # A checkpoint is its content: a copy under another name goes on, other weights under the same name do not.
        "model": {key: value for key, value in model.items() if key != "name"} if "digest" in model else model,
        "benchmark": {"name": benchmark.name, **{key: benchmark.source[key] for key in ("version", "digest")}},
        "prompt": _prompt_facts(args) | {"instruction": instruction_for(benchmark, args.prompt_instruction)},
        "sampling": asdict(args.sampling),
        "seed": args.seed,
        # The batch decides the text of the transformers engine; see engines.py.
        "engine": {"name": args.engine, "dtype": args.dtype, "batch_size": engine_facts(args).get("batch_size")},
    }
    store = SampleStore(evaluation_file(args.output_dir, "samples", benchmark.name), settings)
    if store.repaired:
        logger.warning(store.repaired)
    return store


def _write_grades(
    args: EvaluationArguments, benchmark: LoadedBenchmark, graded: dict[tuple[str, int], GradedSample]
) -> None:
    """One character per sample, in order: 1 correct, 0 wrong (or a soft outcome below 1), - not gradable."""
    grades = {}
    for problem in benchmark.problems:
        outcomes = [graded[problem.id, sample].outcome for sample in range(args.n)]
        grades[problem.id] = "".join("-" if o is None else "1" if o == 1.0 else "0" for o in outcomes)
    path = evaluation_file(args.output_dir, "grades", benchmark.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grades, indent=0) + "\n", encoding="utf-8")


def _add_token_entropy(
    args: EvaluationArguments, benchmarks: Sequence[LoadedBenchmark], entries: dict[str, Any]
) -> None:
    """Teacher-forced entropy of the first samples of each problem, averaged over completions."""
    from .sampling import completion_entropies

    engine = TransformersEngine.load(
        args.model, revision=args.revision, dtype=args.dtype, chat_template_kwargs=args.template_kwargs
    )
    for benchmark in benchmarks:
        problems = {problem.id: problem for problem in benchmark.problems}
        stored = read_samples(evaluation_file(args.output_dir, "samples", benchmark.name))
        kept = [r for r in stored if r["sample"] < args.token_entropy_samples and r["completion"]]
        kept.sort(key=lambda r: (r["problem"], r["sample"]))  # stored in the order of their arrival
        prompts = [args.prompt_of(problems[r["problem"]].of_sample(r["seed"])[0], benchmark) for r in kept]
        texts = [render_prompt(engine.tokenizer, prompt, args.template_kwargs) for prompt in prompts]
        entropies = completion_entropies(engine.model, engine.tokenizer, texts, [r["completion"] for r in kept])
        entries[benchmark.name]["token_entropy"] = sum(entropies) / len(entropies) if entropies else None
