"""`pacs-trl recipes`: list the recipes of this installation, and copy them to change them."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .errors import UserError
from .settings import Parser, did_you_mean


PACKAGE = Path(__file__).resolve().parent
# In the wheel, or in a checkout.
RECIPES = PACKAGE / "recipes" if (PACKAGE / "recipes").is_dir() else PACKAGE.parent / "recipes"
KINDS = {
    "evaluation": "Evaluations",
    "accelerate_configs": "For `accelerate launch`",
    "launch": "Launch scripts",
}
PAGES = [RECIPES / "README.md"]
NAMED_FILE = re.compile(r"recipes/([\w./-]+\w)")


def recipes() -> dict[str, Path]:
    """Return all files of recipes by their names, which are paths without `.yaml`."""
    files = sorted(path for path in RECIPES.rglob("*") if path.is_file() and path.suffix not in (".md", ".jsonl"))
    return {str(path.relative_to(RECIPES)).removesuffix(".yaml"): path for path in files}


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the start of a file."""
    comment = re.search(r"^# \S.*(?:\n# \S.*)*", path.read_text(encoding="utf-8"), re.MULTILINE)
    text = comment[0].replace("# ", "").replace("\n", " ") if comment else ""
    return textwrap.shorten(re.split(r"(?<=\.) ", text)[0].rstrip("."), 100, placeholder=" ...")


def with_named_files(path: Path) -> list[Path]:
    """Return a recipe and what it names in this folder: data, launch files, evaluations, and what these name."""
    files = [path]
    for file in files:
        named = [RECIPES / name for name in NAMED_FILE.findall(file.read_text(encoding="utf-8"))]
        files += [other for other in dict.fromkeys(named) if other.is_file() and other not in files + PAGES]
    return files


def copy(names: Sequence[str], output_dir: Path) -> list[Path]:
    """Copy recipes and the files that they name to `output_dir`, and return the copies. Raises a `ValueError` for an
    unknown name, if a copy exists with other content, and if the folder cannot be written."""
    known = recipes()
    files: list[Path] = []
    for name in names:
        if (short := name.removeprefix("recipes/").removesuffix(".yaml")) not in known:
            near = did_you_mean(short, known)
            raise UserError(f"There is no recipe {name!r}.{near} `pacs-trl recipes` lists them.")
        files += with_named_files(known[short])
    copies = {file: output_dir / file.relative_to(RECIPES) for file in files}
    for file, copied in copies.items():
        if copied.exists() and copied.read_bytes() != file.read_bytes():
            raise UserError(f"{copied} exists with other content. Rename it, or choose another --output_dir.")
    try:
        for file, copied in copies.items():
            copied.parent.mkdir(parents=True, exist_ok=True)
            if not copied.exists():
                shutil.copyfile(file, copied)
                copied.chmod(file.stat().st_mode)
    except OSError as error:
        raise UserError(
            f"Recipes cannot be copied to {output_dir} ({error.strerror}). Choose a folder that can be written as "
            "--output_dir."
        ) from error
    return list(copies.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl recipes`; return the exit status."""
    parser = Parser("recipes", "List recipes, or copy those that are named, with the files that they name.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes to copy, such as first_run/pacs")
    parser.add_argument("--output_dir", type=Path, default=Path("recipes"), help="folder of copies (default: recipes)")
    args = parser.parse_args(argv)
    if args.names:
        print("\n".join(map(str, copy(args.names, args.output_dir))))
        return 0
    sections: dict[str, list[str]] = {"Training": []}
    for name, path in recipes().items():
        section = KINDS.get(name.partition("/")[0], "Training")
        sections.setdefault(section, []).append(f"  {name:34} {first_sentence(path)}")
    print("\n\n".join("\n".join([f"{title}:", *lines]) for title, lines in sections.items()))
    print("\n`pacs-trl recipes NAME ...` copies recipes, and the files that they name, to ./recipes.")
    return 0
