"""Results documents made from a beta-binomial world, so that tables and figures have something to show."""

import numpy as np

from pacs_trl.evaluation.results import RESULTS_SCHEMA, GradedSample, summarize


BENCHMARKS = {"aime_2024": ("AIME 2024", 30), "aime_2025": ("AIME 2025", 30), "math_500": ("MATH 500", 40)}
PROTOCOL = {
    "sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_new_tokens": 8192},
    "prompt": {"instruction": "Box it.", "system_prompt": None, "chat_template_kwargs": None},
    "verifier": {"name": "math_verify", "version": "0.9.0", "protocol": "authors", "cpu_seconds": 0.5},
}


def make_results(method, skill, seed=0, n=128, ks=(1, 4, 8, 16, 32, 64), benchmarks=tuple(BENCHMARKS), **changes):
    """A results document; `skill` is the mean success rate."""
    rng = np.random.default_rng(seed)
    entries = {}
    for name in benchmarks:
        title, num_problems = BENCHMARKS[name]
        graded = []
        for i, p in enumerate(rng.beta(2 * skill, 2 * (1 - skill), num_problems)):
            for correct in rng.random(n) < p:
                graded.append(GradedSample(str(i), float(correct), int(rng.integers(10, 99)), "stop"))
        source = {"hub_id": f"org/{name}", "split": "test", "revision": None, "config": None}
        source |= {"version": 1, "digest": "d" * 16, "num_problems": num_problems}
        entries[name] = {
            "title": title,
            "source": source,
            **summarize(list(map(str, range(num_problems))), graded, ks),
        }
    return {
        "schema_version": RESULTS_SCHEMA,
        "created": "2026-01-01T00:00:00+00:00",
        "method": method,
        "model": {"name": f"org/{method}", "revision": "abc"},
        "n": n,
        "k": list(ks),
        "seed": seed,
        "protocol": PROTOCOL,
        "prompt_digest": "p" * 16,
        "engine": {"name": "vllm", "dtype": "auto", "tensor_parallel_size": 1},
        "benchmarks": entries,
        "versions": {"python": "3.11", "vllm": "0.31.0", "math-verify": "0.9.0", "torch": "2.13.0"},
        "hardware": {"machine": "x86_64", "cpu_cores": 2, "gpus": ["NVIDIA H200"]},
        "commit": "0123456789abcdef",
    } | changes
