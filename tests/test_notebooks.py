"""The notebooks as they are committed: with outputs (but for the one that wants a GPU), without traces of a machine,
and clear about what they need.

That they run is the business of `make notebooks`.
"""

import json
import re
from pathlib import Path

import pytest

from notebook_tools import pacs_trl


NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
NOISE = r"/work|/tmp|/root|/home|\d+it/s|it/s\]|\d+%\||Warning"


def cells_of(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def texts(output: dict) -> str:
    data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
    return json.dumps([output.get("text", ""), data])


EXECUTED = [path for path in NOTEBOOKS if path.stem != "05_one_gpu"]


def test_what_was_not_run_on_a_gpu_has_no_outputs():
    (path,) = set(NOTEBOOKS) - set(EXECUTED)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells_of(path, "code"))
    assert "ot tested on a GPU" in path.read_text()


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_executed_in_order_and_clean(path):
    cells = cells_of(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    for output in outputs:
        assert not re.search(NOISE, texts(output)), texts(output)[:300]
    assert path.stat().st_size < 1_500_000


def test_a_command_that_fails_ends_the_cell(capsys):
    with pytest.raises(RuntimeError, match="nonsense"):
        pacs_trl("nonsense")
    assert "nonsense" in capsys.readouterr().out
