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
    """Run the examples that have no outcome yet, or those of the list `only`."""
    examples = yaml.safe_load((HERE / "examples.yaml").read_text())
    results = Path(env["TRL_SUITE_RESULTS"])
    known = last_outcomes(results)
    codes = {name: (trl / script["path"]).read_text() for name, script in examples["scripts"].items()}
    codes |= {name: code_of(trl, block) for name, block in examples["blocks"].items()}
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for number, (name, code) in enumerate(codes.items()):
            if name in only if only else name not in known:
                file = Path(folder) / f"example_{number}.py"
                file.write_text(code)
                jobs.append([name, str(file), examples["scripts"].get(name, {}).get("arguments", [])])
        listed = Path(folder) / "examples.json"
        listed.write_text(json.dumps(jobs))
        subprocess.run([sys.executable, HERE / "run_examples.py", listed], env=env, cwd=stand_ins / "small")
