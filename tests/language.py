"""Check of wording, for `make quality`: phrases that engineers do not use, and module docstrings that ask questions.

Run as `python tests/language.py`. It prints each place and exits with 1 if there is one.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
BANNED = re.compile(
    r"""
    what\ your\ card\ makes | rollouts\ are\ dear | \bdear(?:er|est)?\b | \bmet\ a\ GPU | is\ content\ and
    | teach(?:es)?\ nothing | who\ divides | \bsays\ nothing | is\ claimed\ of | \bgets?\ no\ verdict | draws_again
    | _keep_steps | is\ looked\ for | came\ of\ it | \bmend(?:s|ed|ing)?\b | takes?\ the\ place\ of | is\ it\ otherwise
    | \blent_to\b | drawn\ for\ that | \btorn\b | could\ be\ had | is\ no\ function | what\ stands\ there
    | multiply\ into\ them | at\ the\ begin\b | last\ layer\ says | _look_inside | \bfill_in\b | leaves_out
    | machine\ may\ lack | whoever\ read | the_one_to_keep | \bpatiently\b | \bdoubts\b | seconds\ of\ drawing
    | seconds\ of\ the\ processor | \bgoes\ wrong | dense\ pairs | learning\ several\ times
    """,
    re.VERBOSE | re.IGNORECASE,
)
QUESTION = re.compile(r"(What|How|Which|Who|Where|When|Why)\b")


def main() -> int:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    problems = []
    for name in files:
        is_text = name.endswith((".py", ".md", ".yaml", ".ipynb", ".txt", ".cfg")) or name == "Makefile"
        if not is_text or name.startswith(("docs/results/", "tests/data/")) or name == "tests/language.py":
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        problems += [f"{name}:{text[: m.start()].count(chr(10)) + 1}: {m[0]!r}" for m in BANNED.finditer(text)]
        docstring = (name.endswith(".py") and ast.get_docstring(ast.parse(text))) or ""
        if QUESTION.match(docstring):
            problems.append(f"{name}:1: module docstring begins with {docstring.split()[0]!r}")
    if problems:
        print(*problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
