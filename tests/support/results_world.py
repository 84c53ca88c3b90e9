"""Results documents made from a beta-binomial world, so that tables and figures have something to show."""

import numpy as np

from support.finished_runs import results_of


BENCHMARKS = {"aime_2024": ("AIME 2024", 30), "aime_2025": ("AIME 2025", 30), "math_500": ("MATH 500", 40)}
PROTOCOL = {
    "sampling": {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_new_tokens": 8192},
    "prompt": {"instruction": "Box it.", "system_prompt": None, "chat_template_kwargs": None},
    "verifier": {"name": "math_verify", "version": "0.9.0", "protocol": "authors", "cpu_seconds": 0.5},
}


def make_results(method, skill, seed=0, n=128, ks=(1, 4, 8, 16, 32, 64), benchmarks=tuple(BENCHMARKS), **changes):
    """A results document; `skill` is the mean success rate."""
    rng = np.random.default_rng(seed)
    rates = {name: rng.beta(2 * skill, 2 * (1 - skill), BENCHMARKS[name][1]) for name in benchmarks}
    results = results_of({name: rng.binomial(n, p).tolist() for name, p in rates.items()}, n, ks, **PROTOCOL)
    for name, entry in results["benchmarks"].items():
        entry["title"] = BENCHMARKS[name][0]
        entry["source"] |= {"hub_id": f"org/{name}", "split": "test", "revision": None, "config": None}
    return (
        results
        | {
            "created": "2026-01-01T00:00:00+00:00",
            "method": method,
            "model": {"name": f"org/{method}", "revision": "abc"},
            "seed": seed,
            "prompt_digest": "p" * 16,
            "engine": {"name": "vllm", "dtype": "auto", "tensor_parallel_size": 1},
            "versions": {"python": "3.11", "vllm": "0.31.0", "math-verify": "0.9.0", "torch": "2.13.0"},
            "hardware": {"machine": "x86_64", "cpu_cores": 2, "gpus": ["NVIDIA H200"]},
            "commit": "0123456789abcdef",
        }
        | changes
    )
