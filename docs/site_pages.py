"""Pages of the documentation site that follow from the code: the API of the exported names, and the recipes.

`docs/conf.py` calls `write` before each build; the pages are in docs/generated, which git ignores. Two generated pages
are committed, and `make settings` writes them: docs/settings.md, and docs/metrics.md from docs/metrics.yaml.
"""

import inspect
import re
import textwrap
from pathlib import Path

import yaml


# Sections of the API page: title, and what a name ends with. A name goes to the first section that fits.
API_SECTIONS = (("Trainers", "Trainer"), ("Configurations", "Config"), ("Rewards, verification, evaluation", ""))


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def write(root: Path) -> None:
    folder = root / "docs/generated"
    folder.mkdir(exist_ok=True)
    for name, text in {"api": api_page(), "recipes": recipes_page(root)}.items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:  # an unchanged page is not built again
            page.write_text(text)


def api_page() -> str:
    """List every name of `pacs_trl.__all__` with its docstring."""
    import pacs_trl

    names = [name for name in pacs_trl.__all__ if not name.startswith("__")]
    parts = ["# API", "Everything that `pacs_trl` exports. Settings of configurations: [settings](../settings.md)."]
    for title, ending in API_SECTIONS:
        chosen = sorted(name for name in names if name.endswith(ending))
        names = [name for name in names if name not in chosen]
        if chosen:
            parts += [f"## {title}", *(f"### {name}\n\n{directive(pacs_trl, name)}" for name in chosen)]
    return "\n\n".join(parts) + "\n"


def directive(module, name: str) -> str:
    value = getattr(module, name)
    kind = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "autodata"
    options = ""
    if kind == "autoclass" and not name.endswith(("Config", "Trainer")):
        options = "\n   :members:\n"
    signature = "(output_dir, **settings)" if name.endswith("Config") else ""  # instead of about 200 settings
    return f"```{{eval-rst}}\n.. {kind}:: {module.__name__}.{name}{signature}\n{options}```"


def recipes_page(root: Path) -> str:
    """List all training recipes with method, model, data, and the first sentence of their comment."""
    folders: dict[str, list[str]] = {}
    for file in sorted((root / "recipes").rglob("*.yaml")):
        settings = yaml.safe_load(file.read_text())
        if not isinstance(settings, dict) or "dataset_name" not in settings and "environment" not in settings:
            continue
        folder = str(file.parent.relative_to(root / "recipes"))
        data = settings.get("dataset_name") or settings["environment"]
        cells = [f"[{file.stem}](../../{file.relative_to(root)})", f"`{settings.get('method', 'pacs')}`"]
        cells += [first_sentence(file.read_text()), f"`{settings.get('model_name_or_path', '')}`", f"`{data}`"]
        folders.setdefault(folder, []).append(f"| {' | '.join(cells)} |")
    parts = [
        "# All recipes",
        "One YAML file per run, with source, hardware, launch command, and expected numbers in its comment. "
        "[Which recipe is for which table of the paper, and how to launch them](../../recipes/README.md).",
    ]
    for folder, rows in folders.items():
        header = "| recipe | `method` | what it is | model | data |\n| --- | --- | --- | --- | --- |"
        parts.append(f"## {folder}\n\n" + "\n".join([header, *rows]))
    return "\n\n".join(parts) + "\n"


def first_sentence(text: str) -> str:
    comment = " ".join(line[1:].strip() for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    return re.split(r"(?<=[\w)`])[.] ", comment + " ")[0].strip().rstrip(".")


def metrics_page(root: Path) -> str:
    """Format docs/metrics.yaml as the page on metrics."""
    parts = []
    for block in yaml.safe_load((root / "docs/metrics.yaml").read_text(encoding="utf-8")):
        if "heading" in block:
            parts.append(f"{'#' * block.get('level', 2)} {block['heading']}")
        elif "text" in block:
            parts.append(textwrap.fill(block["text"], 100, break_long_words=False, break_on_hyphens=False))
        else:
            rows = [block["columns"], ["---"] * len(block["columns"]), *block["rows"]]
            parts.append("\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows))
    return "\n\n".join(parts) + "\n"


# Navigation -------------------------------------------------------------------------------------------------------


def add_navigation(app, docname: str, source: list[str]) -> None:
    """Append the tables of contents, which GitHub would show as code: of the index from its table, whose bold rows
    are captions; of the results the archive."""
    if docname == "docs/index":
        sections = re.split(r"^\| \*\*(.+?)\*\* \| \|$", source[0], flags=re.MULTILINE)
        for caption, rows in zip(sections[1::2], sections[2::2], strict=True):
            names = re.findall(r"\]\(([^)#]+)\.(?:md|ipynb)\)", rows)
            if caption == "Look up":
                names += ["generated/recipes", "generated/api"]
            source[0] += contents(names, caption)
        source[0] = source[0].replace("\n\n| page |", "\n\n" + front_page() + "\n\n## Pages\n\n| page |", 1)
    elif docname == "docs/results/README":
        source[0] += contents(["*/README"])
    elif docname == "docs/results/miniature/README":
        source[0] += contents(["figure_*", "table_*", "archive"])


def front_page() -> str:
    """Return README from "Train" on, without its links at the end, as part of a page in docs/."""
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    text = "## Train" + text.split("\n## Train", 1)[1].split("\n## Read on", 1)[0]
    return re.sub(r"\]\((?!https?:)(docs/)?", lambda match: "](" if match[1] else "](../", text).strip()


def contents(names: list[str], caption: str = "") -> str:
    """Format a hidden table of contents of pages, with paths from the page that has it."""
    title = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n:glob:\n" + title + "\n" + "\n".join(names) + "\n```\n"


# Docstrings --------------------------------------------------------------------------------------------------------


def docstring_to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn a docstring in Markdown into reStructuredText, in place: code spans, references, and links."""
    text = re.sub(r"(?m)^( *)```(\w*)\n(.*?)^ *```$", _code_block, "\n".join(lines), flags=re.DOTALL)
    blocks = re.split(r"(?m)(^ *\.\. code-block::.*\n(?:\n| .*\n?)+)", text)
    lines[:] = "".join(block if n % 2 else _prose(block) for n, block in enumerate(blocks)).split("\n")


def _code_block(match: re.Match) -> str:
    indent, language, code = match.groups()
    code = "".join(f"   {line}\n" if line.strip() else "\n" for line in code.rstrip("\n").split("\n"))
    return f"{indent}.. code-block:: {language or 'text'}\n\n{code}"


def _prose(text: str) -> str:
    spans: list[str] = []

    def keep(replacement: str) -> str:
        spans.append(replacement)
        return f"\0{len(spans) - 1}\0"

    text = re.sub(r"\[`~?([^`]+)`\]", lambda match: keep(f"``{match[1]}``"), text)
    text = re.sub(r"`([^`]+)`", lambda match: keep("``" + re.sub(r"\s+", " ", match[1]) + "``"), text)
    text = re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", lambda match: keep(f"`{match[1]} <{match[2]}>`__"), text)
    text = re.sub(r"(?<![\w*])\*([\w ]+)\*(?![\w*])", lambda match: keep(match[0]), text)
    text = re.sub(r"([*|_])", r"\\\1", text)
    return re.sub(r"\0(\d+)\0", lambda match: spans[int(match[1])], text)


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    (ROOT / "docs/metrics.md").write_text(metrics_page(ROOT), encoding="utf-8")
