"""Pytest plugin that gives TRL's tests other trainers, and keeps their outcomes.

Variables of the environment name the trainers (`TRL_SUITE_TRAINERS`: `trl`, `pacs_trl`, or `pacs`), the file of
outcomes (`TRL_SUITE_RESULTS`, a line of JSON for each test), and the seconds after which no test is started
(`TRL_SUITE_SECONDS`).
"""

import gc
import inspect
import json
import os
import re
import time
from pathlib import Path

import datasets
import pytest
from outcomes import last_outcomes, short_name
from replaced_names import replace_trainers


STARTED = time.monotonic()
RESULTS = Path(os.environ["TRL_SUITE_RESULTS"])

replace_trainers(os.environ["TRL_SUITE_TRAINERS"])


def folder_of(test) -> str:
    """Return the folder of the stand-ins of a test: those whose code contains token ids (numbers of five or six
    digits) need the large vocabulary, those that quote a prompt the whole dataset."""
    code = inspect.getsource(test)
    return "large" if re.search(r"\b\d{5,6}\b", code) else "long" if "Beautiful is better" in code else "small"


def pytest_collection_modifyitems(items):
    known = last_outcomes(RESULTS) if "TRL_SUITE_AGAIN" not in os.environ else {}
    items[:] = [item for item in items if short_name(item.nodeid) not in known]
    items.sort(key=lambda item: folder_of(item.function) == "large")  # slow ones last


def pytest_collection_finish():
    """Modules stay; collecting garbage, which each training does twice, does not look through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def stand_ins(request):
    """Runs the test where its models and data are."""
    folder = Path(os.environ["TRL_SUITE_STAND_INS"]) / folder_of(request.function)
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"


def pytest_runtest_setup(item):
    if time.monotonic() - STARTED > float(os.environ.get("TRL_SUITE_SECONDS", "inf")):
        item.session.shouldstop = "time limit"


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        record = {"test": short_name(report.nodeid), "outcome": outcome, "seconds": round(report.duration, 1)}
        if outcome == "failed":
            record["error"] = str(
                report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else report.longrepr
            )[-600:]
            record["where"] = report.longreprtext[-6000:]
        elif outcome == "skipped":
            record["error"] = str(report.longrepr)[-200:]
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
