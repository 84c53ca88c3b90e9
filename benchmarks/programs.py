"""Programs per second: the sandbox compared with two common local methods on the same programs and tests.

    python -m benchmarks.programs [--programs 200] [--rounds 3]

`subprocess` follows open-r1's evaluation script: `python3 -c PROGRAM`, one process per test case, with a time limit
only. `exec` follows verl's prime_code: per program, a forked process that calls `exec`, and a manager for its answers.
Neither isolates the program. All programs are distinct and correct, so every case of every program runs. CPU time is
summed over all processes.
"""

import argparse
import io
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

from pacs_trl.verification.code import CodeVerifier


CASES = [{"input": f"{i} 2\n", "output": f"{i + 2}\n"} for i in range(3)]
TESTS = {"type": "stdin_stdout", "cases": CASES}
WORKERS = 2


def programs(count: int, round_number: int) -> list[str]:
    return [
        "import sys\nfrom collections import deque\na, b = map(int, input().split())\nprint(a + b + "
        f"{i + round_number * count} - {i + round_number * count})"
        for i in range(count)
    ]


def by_sandbox(sources: list[str]) -> list[float]:
    with CodeVerifier(num_workers=WORKERS) as verifier:
        return verifier.grade([f"```python\n{source}\n```" for source in sources], [TESTS] * len(sources))


def by_subprocess(sources: list[str]) -> list[float]:
    def passes(source: str) -> float:
        for case in CASES:
            done = subprocess.run(
                [sys.executable, "-c", source], input=case["input"], text=True, capture_output=True, timeout=5
            )
            if done.returncode or done.stdout.strip() != case["output"].strip():
                return 0.0
        return 1.0

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(passes, sources))


def _exec_cases(source: str, answers) -> None:
    for case in CASES:
        sys.stdin, output = io.StringIO(case["input"]), io.StringIO()
        with redirect_stdout(output):
            exec(source, {"__name__": "__main__"})
        answers.append(output.getvalue().strip() == case["output"].strip())


def by_exec(sources: list[str]) -> list[float]:
    def passes(source: str) -> float:
        with multiprocessing.Manager() as manager:
            answers = manager.list()
            process = multiprocessing.Process(target=_exec_cases, args=(source, answers))
            process.start()
            process.join(timeout=5)
            return float(list(answers) == [True] * len(CASES))

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(passes, sources))


WAYS = {"sandbox": by_sandbox, "subprocess": by_subprocess, "exec": by_exec}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.programs} programs x {len(CASES)} cases, {WORKERS} at a time, {os.cpu_count()} processors")
    for round_number in range(args.rounds):
        sources = programs(args.programs, round_number)
        for name, way in WAYS.items():
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            used = time.process_time()
            labels = way(sources)
            seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime + time.process_time() - used
            assert labels == [1.0] * len(sources), name
            print(
                f"{name:12}{len(sources) / seconds:8.1f} programs/s{1000 * cpu / len(sources):8.1f} ms of processor "
                "per program"
            )


if __name__ == "__main__":
    main()
