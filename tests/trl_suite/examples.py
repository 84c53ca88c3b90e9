"""TRL's examples with stand-in models."""

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import yaml
from outcomes import last_outcomes


HERE = Path(__file__).resolve().parent


def code_of(trl: Path, block: dict) -> str:
    """The block of code of the documentation that contains a text, with its gaps filled."""
    blocks = re.findall(r"^([ \t]*)```(?:python|py)\n(.*?)^[ \t]*```", (trl / block["path"]).read_text(), re.S | re.M)
    code = next(textwrap.dedent(code) for _, code in blocks if block["contains"] in code)
    for gap, filling in block.get("replace", {}).items():
        assert gap in code, gap
        code = code.replace(gap, filling)
    return "\n".join([block.get("before", ""), code, block.get("after", "")])


def run(trl: Path, stand_ins: Path, env: dict[str, str], only: list[str]) -> None:
    """Run the examples that have no outcome yet, or those of the list `only`, each in a process."""
    examples = yaml.safe_load((HERE / "examples.yaml").read_text())
    results = Path(env["TRL_SUITE_RESULTS"])
    known = last_outcomes(results)
    codes = {name: (trl / script["path"]).read_text() for name, script in examples["scripts"].items()}
    codes |= {name: code_of(trl, block) for name, block in examples["blocks"].items()}
    for name, code in codes.items():
        if name not in only if only else name in known:
            continue
        arguments = examples["scripts"].get(name, {}).get("arguments", [])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "example.py"
            file.write_text(code)
            command = [sys.executable, HERE / "run_example.py", file, *arguments]
            process = subprocess.run(command, env=env, cwd=stand_ins / "small", capture_output=True, text=True)
        record = {"test": name, "outcome": "passed" if process.returncode == 0 else "failed"}
        if process.returncode:
            record |= {"error": process.stderr.strip().split("\n")[-1], "where": process.stderr[-5000:]}
        print(record["outcome"], name, record.get("error", "")[:300], flush=True)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
