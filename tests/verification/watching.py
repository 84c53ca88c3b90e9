"""Helpers for tests of graders: rows of files, forms of completions, and processes as /proc shows them."""

import json
import time
from pathlib import Path


def read_jsonl(name):
    """The rows of a file of tests/data."""
    text = (Path(__file__).parents[1] / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def block(source):
    return f"Here it is:\n```python\n{source}\n```\nDone."


def box(answer):
    return f"\\boxed{{{answer}}}"


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(verifier):
    """Process ids of the workers of a verifier of answers or programs, once they are there."""
    if (pool := verifier.start()) is None:
        workers = [verifier._pool.get() for _ in range(verifier.num_workers)]
        for worker in workers:
            verifier._pool.put(worker)
        return sorted(worker.pid for worker in workers)
    verifier.grade([box(0)], [0])
    return children(pool.pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
