"""The table of docs/from_trl.md that counts TRL's tests; `python tests/trl_suite/table.py` writes it."""

import textwrap
from pathlib import Path

import yaml
from outcomes import EXPECTED, expected_outcomes


PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"
START, END = "<!-- written by tests/trl_suite/table.py -->\n", "<!-- end -->\n"


def count(number: int) -> str:
    return f"{number} test{'s' * (number != 1)}"


def build_table() -> str:
    """The text between the two marks of the page."""
    expected = yaml.safe_load(EXPECTED.read_text())
    outcomes, pacs = expected_outcomes("pacs_trl"), expected_outcomes("pacs")
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    lines = [
        f"Of {len(outcomes)} tests of GRPO and RLOO in TRL's repository (commit {expected['commit']}) that pass on a "
        f"CPU without vLLM with TRL {expected['trl']}'s trainers, **{passed} pass** with those of this package, "
        "unchanged (`tests/trl_suite`).",
        "",
        "| TRL's tests of | work as in TRL | differ, and why | refused |",
        "| --- | --- | --- | --- |",
    ]
    for area, tests in expected["areas"].items():
        cells = [area, f"{sum(outcomes[test] == 'passed' for test in tests)} of {len(tests)}"]
        for kind in ("differs", "refused"):
            reasons = [(difference["reason"], len({*tests} & {*difference["tests"]})) for difference in expected[kind]]
            cells.append("; ".join(f"{reason} ({count(number)})" for reason, number in reasons if number))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| **all** | **{passed} of {len(outcomes)}** | | |")
    not_run = [f"{reason['reason']} ({count(len(reason['tests']))})" for reason in expected["not run"]]
    if not_run:
        lines += ["", f"Not run with either: {'; '.join(not_run)}."]
    works = sum(outcome == "passed" for outcome in pacs.values())
    lines += [
        "",
        "With `PACSTrainer` in the place of `GRPOTrainer`, and rewards scaled to [0, 1] as labels, "
        f"**{works} of {len(pacs)}** of GRPO's tests pass.",
    ]
    for kind, title in (("PACS", "The others"), ("not for PACS", "Not applicable")):
        reasons = [f"{reason['reason']} ({count(len(reason['tests']))})" for reason in expected[kind]]
        if reasons:
            lines[-1] += f" {title}: {'; '.join(reasons)}."
    examples = yaml.safe_load((EXPECTED.parent / "examples.yaml").read_text())
    number = len(examples["scripts"]) + len(examples["blocks"])
    failing = {name for reason in expected["examples"] for name in reason["tests"]}
    lines += [
        "",
        f"Of TRL's example scripts and blocks of code of its documentation that train on text, {number} were run for "
        f"two steps each, with stand-in models and without vLLM: **{number - len(failing)} run**.",
    ]
    for difference in expected["examples"]:
        lines.append(f"{', '.join(f'`{name}`' for name in difference['tests'])}: {difference['reason']}.")
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 100) for line in lines) + "\n"


def page_with_table() -> str:
    page = PAGE.read_text()
    return page[: page.index(START) + len(START)] + build_table() + page[page.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
