"""What the measured steps mean together: PACS against GRPO, and `plan` against the measurement. Pure functions of their rows."""

import statistics
from collections.abc import Sequence
from typing import Any


# What `plan` says of itself: accurate to a factor of 1.5.
FACTOR_OF_PLAN = 1.5


def _rows(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for entry in steps for row in entry["rows"] if "seconds" in row]


def faster(steps: Sequence[dict[str, Any]]) -> str:
    """How many times PACS is as fast as TRL's GRPO at its best, for each model that both were measured with."""
    rows, said = _rows(steps), []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        grpo = min((row["seconds"] for row in of_model if row["method"] == "grpo"), default=None)
        for uniform in (0.0, 0.5):
            own = [r for r in of_model if r["method"] == "pacs" and r["uniform"] == uniform]
            if grpo and own:
                best = min(own, key=lambda row: row["seconds"])
                share = f", FLOP utilization {best['utilization']:.0%}" if uniform == 0 else ""
                said.append(
                    f"{model}: {grpo / best['seconds']:.2f} times as fast as GRPO with {uniform:.0%} uniform{share}"
                )
    return "; ".join(said)


def against_plan(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    The result of the part `plan`: errors in percent (above 0: plan says too much), and the constants that would make it right. Of
    rows that learn from every group.
    """
    entry = {"part": "plan", "name": "plan"}
    rows = [row for row in _rows(steps) if row["uniform"] == 0.0 and "planned_bytes" in row]
    if not rows:
        return {**entry, "status": "not run", "reason": "there is no result of the part step yet"}
    table, bars = [], {}
    for row in rows:
        activations = (row["measured_bytes"] - row["planned_state_bytes"]) / row["planned_activation_bytes"]
        table.append(
            {
                **{key: row[key] for key in ("model", "method", "checkpointing", "rows per forward")},
                "measured GiB": row["measured_bytes"] / 2**30,
                "plan GiB": row["planned_bytes"] / 2**30,
                "error of memory, %": 100 * (row["planned_bytes"] / row["measured_bytes"] - 1),
                "factor on activations": activations,
                "measured s": row["seconds"],
                "plan s": row["planned_seconds"],
                "error of time, %": 100 * (row["planned_seconds"] / row["seconds"] - 1),
                "training_share": row["planned_share"] * row["planned_seconds"] / row["seconds"],
            }
        )
        ratio = row["planned_bytes"] / row["measured_bytes"]
        if row[
            "planned_state_bytes"
        ]:  # on a CPU only what autograd keeps is measured, and sizes are too small to judge it
            name = f"{row['model']}, {row['method']}, checkpointing {row['checkpointing']}"
            text = f"plan's memory is right to a factor of {FACTOR_OF_PLAN}: {name}"
            bars[text] = 1 / FACTOR_OF_PLAN < ratio < FACTOR_OF_PLAN
    of_pacs = [line for line in table if line["method"] == "pacs"] or table
    share, factor = (
        statistics.median(line[key] for line in of_pacs) for key in ("training_share", "factor on activations")
    )
    worst = max(table, key=lambda line: abs(line["error of memory, %"]))
    short = (
        f"memory off by at most {worst['error of memory, %']:+.0f} %; right would be training_share={share:.3f} instead of "
        f"{rows[0]['planned_share']}, and activations times {factor:.2f}"
    )
    missed = [text for text, holds in bars.items() if not holds]
    status, reason = ("failed" if missed else "passed"), "; ".join(f"not so: {text}" for text in missed)
    return {**entry, "status": status, "reason": reason, "rows": table, "bars": bars, "short": short}
