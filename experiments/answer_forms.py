"""Try whether a reward can be gained by the form of an answer: `python -m experiments.answer_forms`.

Grades constructed completions with each protocol, and the saved completions of two training runs of SmolLM2 that
differ only in their protocol (`log_completions: true`; the commands are in docs/results/answer_forms/README.md).
Writes `numbers.json`, prints the tables, and draws the curves.
"""

import argparse
import json
import re
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from experiments.figures import save
from experiments.studies import markdown
from pacs_trl.report import plots
from pacs_trl.verification import Verifier, completion_text


PROTOCOLS = ("authors", "number", "robust")
# Completions of "What is 54 + 3?", graded for the gold 57 and for the gold 58.
CONSTRUCTED = (
    "57",
    "54 + 3 = 57",
    "54 + 3",
    "54 + 3 =",
    "54 + 3 = ?",
    r"\boxed{54 + 3}",
    r"\boxed{57} \boxed{58}",
    r"\boxed{57} or \boxed{58}",
    r"\boxed{57}. No, \boxed{58}",
    r"$\boxed{57}$ $\boxed{58}$",
    r"\boxed{57, 58}",
    "57 or 58",
    r"It is 57, so \boxed{}",
    r"<think>\boxed{57}</think> 58",
)
GOLDS = ("57", "58")
# A sum after which no number follows.
_UNEVALUATED = re.compile(r"\d+ ?\+ ?\d+\D*\Z")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def is_unevaluated(text: str) -> bool:
    return _UNEVALUATED.search(text) is not None


def has_different_boxes(text: str) -> bool:
    return len({content.strip() for content in _BOXED.findall(text)}) > 1


def accepted_golds(verifier: Verifier) -> list[str]:
    """Return for each constructed completion the golds for which it is graded correct."""
    labels = {gold: verifier.grade(CONSTRUCTED, [gold] * len(CONSTRUCTED)) for gold in GOLDS}
    return [", ".join(gold for gold in GOLDS if labels[gold][i]) for i in range(len(CONSTRUCTED))]


def shares_of_run(run: Path, verifiers: dict[str, Verifier]) -> list[dict[str, float]]:
    """Return for each update the shares of forms among the completions of a run, and of correct ones by protocol."""
    rows = []
    for file in sorted(run.glob("completions/completions_*.parquet")):
        table = pd.read_parquet(file)
        texts = [completion_text(list(completion)) or "" for completion in table["completion"]]
        golds = list(table["solution"])
        row = {
            "update": int(table["step"].iloc[0]),
            "unevaluated": sum(map(is_unevaluated, texts)) / len(texts),
            "several boxes": sum(map(has_different_boxes, texts)) / len(texts),
        }
        for protocol, verifier in verifiers.items():
            labels = verifier.grade(texts, golds)
            row[protocol] = sum(label or 0.0 for label in labels) / len(labels)
        rows.append(row)
    return rows


def draw(shares: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Draw for each protocol of training the share of unevaluated sums and the rewards that each protocol gives."""
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE_WIDTH, plots.PANEL_HEIGHT + 0.4), layout="constrained")
        panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
        names = ("unevaluated", *PROTOCOLS)
        for panel, (protocol, runs) in zip(panels, shares.items(), strict=True):
            for name, (color, marker, dash) in zip(names, plots.OTHERS, strict=False):
                label = "unevaluated sums" if name == "unevaluated" else f"correct by {name}"
                for number, rows in enumerate(runs):
                    updates = [row["update"] for row in rows]
                    values = [row[name] for row in rows]
                    style = {"color": color, "marker": marker, "linestyle": dash, "alpha": 1.0 if number == 0 else 0.4}
                    panel.plot(updates, values, label=label if number == 0 else None, **style)
            panel.set(title=f"trained with {protocol}", xlabel="optimizer step", ylim=(-0.03, 1.03))
            panel.set_xticks(range(0, 21, 5))
        panels[0].set_ylabel("share of completions")
        plots.legend_below(figure, list(panels), "strong lines: seed 0; faint lines: seed 1")
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for protocol in ("authors", "robust"):
        parser.add_argument(f"--{protocol}", type=Path, nargs="+", required=True, help="output_dir of runs, by seed")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/answer_forms"))
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)

    verifiers = {protocol: Verifier(num_workers=1, protocol=protocol) for protocol in PROTOCOLS}
    accepted = {protocol: accepted_golds(verifier) for protocol, verifier in verifiers.items()}
    rows = [[f"`{text}`", *(accepted[protocol][i] for protocol in PROTOCOLS)] for i, text in enumerate(CONSTRUCTED)]
    print("\n".join(markdown(["completion", *PROTOCOLS], rows)))

    runs = {"authors": args.authors, "robust": args.robust}
    shares = {protocol: [shares_of_run(run, verifiers) for run in folders] for protocol, folders in runs.items()}
    for verifier in verifiers.values():
        verifier.close()
    (args.output_dir / "numbers.json").write_text(json.dumps(shares, separators=(",", ":")) + "\n")
    names = ("unevaluated", "several boxes", *PROTOCOLS)
    rows = []
    for protocol, run_shares in shares.items():
        for seed, updates in enumerate(run_shares):
            for part in (updates[:5], updates[-5:]):
                span = f"{part[0]['update']} to {part[-1]['update']}"
                means = [100 * sum(row[name] for row in part) / len(part) for name in names]
                rows.append([protocol, str(seed), span, *(f"{mean:.0f}" for mean in means)])
    heads = ["trained with", "seed", "updates", "unevaluated sums", "several boxes", *PROTOCOLS]
    print("\n".join(["", *markdown(heads, rows, 3)]))
    draw(shares, args.output_dir / "curves.png")


if __name__ == "__main__":
    main()
