"""Records of the finished runs of a results directory, `records.jsonl.gz`, for tables and figures.

They have counts of correct completions, diversities, and the plotted part of training logs; samples, grades, and whole
logs stay in the work directory. There are three kinds of lines, and lines may be deleted:

    {"measured": DIGEST, "protocol": ..., "benchmarks": {NAME: {"ids": ..., "n", "k"}}} protocol of an evaluation
    {"cell": "sums-0.1m/pacs", "settings": {...}} settings of all runs of a cell
    {"cell": "sums-0.1m/pacs", "seed": 0, "measured": DIGEST, "correct": {NAME: [93, 128, ...]}, ...} a run

`correct` has a count for each of `ids`; a run with samples that could not be graded also has `ungraded`, with a count
for each of `ids`, and pass@k is that of the others, as in a results file. Diversities are by problem, with
six decimals, and curves by step.
"""

import copy
import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.miniature.files import CRITIC_PROMPT, benchmark, data_file, model_directory
from pacs_trl.evaluation.results import parse_json, pass_at_k_table
from pacs_trl.evaluation.store import differences, digest


FILE_NAME = "records.jsonl.gz"
_NAME = "miniature/"

# Of a training log, what the figures draw.
CURVES = ("reward", "entropy", "completions/mean_length")

# How an evaluation was made: with what has to be the same in one table, and for whoever wants to know.
_CIRCUMSTANCES = ("protocol", "n", "k", "prompt_digest", "engine", "versions", "hardware", "commit")


class Cell(NamedTuple):
    """A row of a table."""

    label: str
    recipe: str  # what makes it, without `recipes/` and `.yaml`
    trained: bool = True  # False where the model is meant that the recipe starts from
    evaluations: Sequence[str] = ("evaluation/v2",)  # at full scale, what measures it
    settings: Mapping[str, Any] = MappingProxyType({})  # where it differs from its recipe
    name: str | None = None  # of its run, if that is not the recipe's

    @property
    def run(self) -> str:
        """Name of the run in every table: the recipe's, or `base` for an untrained model."""
        if self.name is not None:
            return self.name
        path = self.recipe.removeprefix("miniature/")
        return path if self.trained or path.startswith("evaluation/") else f"{path.rsplit('/', 1)[0]}/base"

    @property
    def words(self) -> list[str]:
        """Settings as words of a command line."""
        values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in self.settings.items()}
        return [word for key, value in values.items() for word in (f"--{key}", value)]

    def directory(self, base: Path, seed: int) -> Path:
        return base / self.run / f"seed-{seed}"


class Run(NamedTuple):
    """Results of a finished run."""

    seed: int  # of its warm start and its training
    results: dict[str, Any]  # as in a results file, as far as tables need it
    diversity: dict[str, dict[str, float]]  # benchmark -> problem -> of its correct completions, where there are two
    # `log_history`, `checkpoints`, and `curves` if others than CURVES are kept; None for a model before training
    training: dict[str, Any] | None


class Records:
    """
    The records of a results directory, empty where there is no file.

    Raises:
        `ValueError`: naming file and line, if it is damaged.
    """

    def __init__(self, results_dir: Path):
        self.path = results_dir / FILE_NAME
        self._measured: dict[str, dict[str, Any]] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        self._runs: dict[tuple[str, int], dict[str, Any]] = {}
        try:
            content = gzip.decompress(self.path.read_bytes()) if self.path.is_file() else b""
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(
                f"{self.path} is damaged: {error}. Restore it, or choose another --results_dir."
            ) from error
        for number, text in enumerate(content.splitlines(), start=1):
            line = parse_json(text, f"{self.path}, line {number},")
            if "seed" in line:
                self._runs[line["cell"], line["seed"]] = line
            elif "settings" in line:
                self._settings[line["cell"]] = _with_files(line["settings"])
            else:
                self._measured[line["measured"]] = line

    def seeds(self, cell: str) -> list[int]:
        """Return the finished seeds of a cell."""
        return sorted(seed for name, seed in self._runs if name == cell)

    def settings(self, cell: str) -> dict[str, Any] | None:
        """Return the settings of the runs of a cell; `None` if they are not recorded."""
        return self._settings.get(cell)

    def require_same_settings(self, cell: str, settings: dict[str, Any]) -> None:
        """Refuse settings other than those of the runs that are there, whatever their seeds."""
        if self.seeds(cell):
            remedy = "Take its lines out of that file to run the cell again, or choose another --results_dir."
            require_same_settings(self.settings(cell), settings, f"{cell} in {self.path}", remedy)

    def runs(self, cell: str, label: str) -> list[Run]:
        """Return the finished runs of a cell in the order of their seeds, with this label in their results."""
        return [self._run(self._runs[cell, seed], label) for seed in self.seeds(cell)]

    def add(self, cell: str, run: Run, settings: dict[str, Any] | None = None) -> None:
        """Add a run, replacing one with the same seed; [`record`] writes the file."""
        facts = _facts(run.results)
        self._measured[digest(facts)] = {"measured": digest(facts), **facts}
        if settings is not None and not self.seeds(cell):
            self._settings[cell] = settings
        line = {"cell": cell, "seed": run.seed, "measured": digest(facts)}
        problems = {name: entry["problems"] for name, entry in run.results["benchmarks"].items()}
        line["correct"] = {name: [problem["c"] for problem in entries] for name, entries in problems.items()}
        ungraded = {name: [problem["ungraded"] for problem in entries] for name, entries in problems.items()}
        if any(any(numbers) for numbers in ungraded.values()):
            line["ungraded"] = ungraded
        line["diversity"] = {
            name: {problem: round(value, 6) + 0.0 for problem, value in scores.items()}  # -0.0 + 0.0 is 0.0
            for name, scores in run.diversity.items()
        }
        if run.training is not None:
            logs = run.training["log_history"]  # a step without a forward pass has no entropy
            line["curves"] = {
                key: {str(log["step"]): log[key] for log in logs if log.get(key) is not None}
                for key in run.training.get("curves", CURVES)
            }
            line["checkpoints"] = run.training["checkpoints"]
        self._runs[cell, run.seed] = line

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return the content of the file, without lines that belong to no run."""
        used = {line["measured"] for line in self._runs.values()}
        yield from (self._measured[key] for key in sorted(used))
        for cell in sorted({cell for cell, _ in self._runs}):
            if cell in self._settings:
                yield {"cell": cell, "settings": self._settings[cell]}
            yield from (self._runs[cell, seed] for seed in self.seeds(cell))

    def _run(self, line: dict[str, Any], label: str) -> Run:
        facts = self._measured[line["measured"]]
        benchmarks = {}
        for name, about in facts["benchmarks"].items():
            counts, n = line["correct"][name], about["n"]
            ungraded = line["ungraded"][name] if "ungraded" in line else [0] * len(counts)
            problems = [
                {"id": problem, "n": n, "c": count, "ungraded": missing}
                for problem, count, missing in zip(about["ids"], counts, ungraded, strict=True)
            ]
            shares = pass_at_k_table([n - missing for missing in ungraded], counts, about["k"])
            benchmarks[name] = about | {"problems": problems, "pass_at_k": shares}
        training = None
        if "curves" in line:
            logs: dict[int, dict[str, Any]] = {}
            for key, points in line["curves"].items():
                for step, value in points.items():
                    logs.setdefault(int(step), {"step": int(step)})[key] = value
            training = {"log_history": [logs[step] for step in sorted(logs)], "checkpoints": line["checkpoints"]}
        return Run(line["seed"], facts | {"method": label, "benchmarks": benchmarks}, line["diversity"], training)


def record(results_dir: Path, cell: str, run: Run, settings: dict[str, Any] | None = None) -> None:
    """Add a finished run of a cell to the records of a results directory, replacing one with the same seed; safe with
    several processes. `settings` are those of all runs of the cell.

    Raises:
        `ValueError`: if a run of the cell was recorded with other settings.
    """
    results_dir.mkdir(parents=True, exist_ok=True)
    with (results_dir / f".{FILE_NAME}.lock").open("w") as lock:  # the file itself is replaced
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = Records(results_dir)
        if settings is not None:
            records.require_same_settings(cell, settings)
        records.add(cell, run, settings)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in records.lines())
        temporary = results_dir / f".{FILE_NAME}.{os.getpid()}"
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.replace(temporary, records.path)


def require_same_settings(recorded: dict[str, Any] | None, wanted: dict[str, Any], where: str, remedy: str) -> None:
    """
    Refuse to go on with what was begun with other settings.

    Raises:
        `ValueError`: naming what differs.
    """
    lines = ["it has none"] if recorded is None else differences(recorded, wanted)
    if lines:
        raise ValueError(
            f"{where} was made with other settings than those of its recipe: {'; '.join(lines)}. {remedy}"
        )


def _with_files(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings recorded when `miniature/TASK` was the name of a model, a dataset, and a benchmark with the
    files that have replaced these names."""
    settings = copy.deepcopy(settings)
    training = settings.get("training") or {}
    if (model := training.get("model_name_or_path", "")).startswith(_NAME):
        training["model_name_or_path"] = str(model_directory(model.removeprefix(_NAME)))
    if (dataset := training.get("dataset_name", "")).startswith(_NAME):
        training["dataset_name"] = str(data_file(dataset.removeprefix(_NAME), "train"))
    if training.get("critic_prompt") == "miniature":
        training["critic_prompt"] = CRITIC_PROMPT
    benchmarks = settings.get("evaluation", {}).get("benchmarks", "")
    if isinstance(benchmarks, str) and benchmarks.startswith(_NAME):
        names = benchmarks.split(",")
        settings["evaluation"]["benchmarks"] = [benchmark(name.removeprefix(_NAME)) for name in names]
    return settings


def _facts(results: dict[str, Any]) -> dict[str, Any]:
    facts = {key: results[key] for key in _CIRCUMSTANCES if key in results}
    facts["benchmarks"] = {}
    for name, entry in results["benchmarks"].items():
        (n,) = {problem["n"] for problem in entry["problems"]}  # an evaluation draws as many for each
        facts["benchmarks"][name] = {
            "title": entry["title"],
            "source": entry["source"],
            "ids": [problem["id"] for problem in entry["problems"]],
            "n": n,
            "k": sorted(map(int, entry["pass_at_k"])),
        }
    return facts
