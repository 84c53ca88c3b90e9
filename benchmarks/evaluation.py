"""Overhead of evaluation in addition to generation, and the speed of pass@k and of the report.

    python -m benchmarks.evaluation                     # the miniature run: 250 problems x 16 samples
    python -m benchmarks.evaluation --model DIR --num_problems 30 --n 128

The benchmark times generation alone, without storage, grading, or statistics, and then `evaluate` on the same
requests, including the start of the verifier. Grading runs in separate processes in parallel with the engine. If the
engine uses all cores, as here, grading slows it down.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from pacs_trl.evaluation import pass_at_k, pass_interval
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.results import write_results
from pacs_trl.evaluation.run import evaluate, load_benchmarks, missing_requests
from pacs_trl.report.report import build_report
from pacs_trl.verification import Verifier


def time_evaluation(model: str, num_problems: int, n: int) -> dict:
    """Time the engine alone and `evaluate` on held-out additions, print the times, and return the results document."""
    with tempfile.TemporaryDirectory() as directory:
        args = EvaluationArguments(
            model=model,
            benchmarks="miniature/addition",
            output_dir=directory,
            n=n,
            k=",".join(str(2**i) for i in range(n.bit_length())),
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=32,
            prompt_instruction="",
            engine="transformers",
            batch_size=256,
            max_problems=num_problems,
        )
        started = time.perf_counter()
        engine = TransformersEngine.load(model, batch_size=args.batch_size)
        loading = time.perf_counter() - started
        requests = missing_requests(args, load_benchmarks(args)[0], set())
        alone = []
        for _ in range(2):  # the first pass warms up
            started = time.perf_counter()
            tokens = sum(completion.num_tokens for _, completion in engine.generate(requests, args.sampling))
            alone.append(time.perf_counter() - started)
        started, graded = time.perf_counter(), children_seconds()
        with Verifier() as verifier:
            results = evaluate(args, verifier, progress=False)
        wall, graded = time.perf_counter() - started, children_seconds() - graded

    print(f"evaluation of {num_problems} problems x {n} samples, {tokens} tokens, on {results['hardware']}")
    print(f"  engine alone            {alone[-1]:7.2f} s   {tokens / alone[-1]:8.0f} tokens/s")
    print(f"  loading the model       {loading:7.2f} s")
    print(f"  evaluate                {wall:7.2f} s")
    print(f"  beyond loading and engine: {100 * ((wall - loading) / alone[-1] - 1):+.2f} %")
    print(f"  CPU seconds of grading: {graded:.2f}")
    return results


def children_seconds() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def time_pass_at_k() -> None:
    """Time pass@k and its intervals for 1,000 problems with 10,000 samples each, and 10 values of k."""
    correct = np.random.default_rng(0).integers(0, 10_001, 1000)
    ks = [1, 4, 8, 16, 32, 64, 256, 1024, 4096, 10_000]
    started = time.perf_counter()
    values = pass_at_k(10_000, correct, ks)
    middle = time.perf_counter()
    pass_interval(values)
    print(
        f"pass@k of 1,000 x 10,000 for 10 k: {middle - started:.3f} s; intervals: {time.perf_counter() - middle:.3f} s"
    )


def time_report(results: dict, num_files: int = 50) -> None:
    """Time a report on `num_files` results files of ten methods, with the published numbers."""
    with tempfile.TemporaryDirectory() as directory:
        paths = []
        for i in range(num_files):
            paths.append(Path(directory) / f"{i}")
            paths[-1].mkdir()
            write_results(paths[-1] / "results.json", json.loads(json.dumps(results)) | {"method": f"method {i % 10}"})
        started = time.perf_counter()
        build_report(paths, Path(directory) / "report", baseline="method 0")
        print(f"report of {num_files} results files: {time.perf_counter() - started:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=None, help="checkpoint directory (default: the warm-started miniature model)"
    )
    parser.add_argument("--num_problems", type=int, default=250)
    parser.add_argument("--n", type=int, default=16)
    args = parser.parse_args()
    if args.model is None:
        from pacs_trl.miniature.warm_start import warm_start

        args.model = str(warm_start("addition"))
    results = time_evaluation(args.model, args.num_problems, args.n)
    time_pass_at_k()
    time_report(results)


if __name__ == "__main__":
    main()
