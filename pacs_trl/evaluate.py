"""`pacs-trl evaluate`: an evaluation from its command line. The work is done by `evaluation/run.py`."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from .data.sets import MINIATURE
from .data.tasks import check_task
from .evaluation.arguments import EvaluationArguments, read_evaluation
from .evaluation.run import evaluate, load_benchmarks
from .settings.optional import require_vllm_for_evaluation


def main(argv: Sequence[str]) -> int:
    """Command line; prints the share of truncated completions, pass@k and where the results are."""
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
    """`miniature/<task>` is the checkpoint that training starts from under this name."""
    if not args.model.startswith(MINIATURE) or args.engine == "server":
        return args
    check_task(args.model.removeprefix(MINIATURE).partition("/")[0])
    if args.engine == "vllm":
        require_vllm_for_evaluation()
    load_benchmarks(args)  # what is wrong with them is said before the warm start is made
    from .miniature.warm_start import warm_start

    return replace(args, model=str(warm_start(args.model.removeprefix(MINIATURE))), method=args.method or "warm start")
