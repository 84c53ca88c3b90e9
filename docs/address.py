"""Links that depend on the address of the repository, which stands in `url` of setup.cfg and nowhere else.

`make address` writes badges, the clone command, and links to the notebooks into README.md, between comments that name
them. Without an address they are empty. The description of the package on an index is README.md with absolute links.
"""

import configparser
import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
INSTALL_FROM_INDEX = """\
```bash
pip install pacs-trl               # Python 3.11 or later; Linux, or macOS without the sandbox
pacs-trl recipes first_run/pacs    # copies a recipe and its data to ./recipes
pacs-trl train --config recipes/first_run/pacs.yaml    # SmolLM2-135M learns sums; about 8 minutes on two CPU cores
```
"""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|mailto:|#)([^()\s]+)\)")


def read_address() -> str | None:
    """Return the address of the repository without a slash at the end, or `None` while there is none."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["metadata"].get("url", "").rstrip("/") or None


def regions(address: str | None) -> dict[str, str]:
    """Return the text of each region of README.md by its name."""
    if address is None:
        return {"badges": "", "clone": "", "notebooks": ""}
    repository = address.removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks"
    notebooks = [path.name for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    return {
        "badges": f"[![PyPI](https://img.shields.io/pypi/v/pacs-trl)](https://pypi.org/project/pacs-trl/) "
        f"[![tests]({address}/actions/workflows/tests.yml/badge.svg)]({address}/actions/workflows/tests.yml)",
        "clone": f"```bash\ngit clone {address} pacs_trl && cd pacs_trl\n```",
        "notebooks": "Open in Colab: "
        + ", ".join(f"[{name[:2]}]({colab}/{name})" for name in notebooks)
        + f"; first `!git clone {address} pacs_trl && pip install -e 'pacs_trl[report,dev]'`, "
        "then `%cd pacs_trl/notebooks`.",
    }


def with_regions(text: str, address: str | None) -> str:
    """Return a page with the content of its regions, which stand between `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, content in regions(address).items():
        inside = f"\n{content}\n" if content else "\n"
        text = re.sub(
            rf"(<!-- {name} -->).*?(<!-- /{name} -->)", lambda m, inside=inside: m[1] + inside + m[2], text, flags=re.S
        )
    return text


def with_absolute_links(text: str, address: str | None, version: str) -> str:
    """Return a page whose links to files of the repository are absolute; without an address, text without links and
    images."""

    def absolute(match: re.Match) -> str:
        is_image, label, target = match.groups()
        if address is None:
            return "" if is_image else label
        kind = "raw" if is_image else "blob"
        return f"{is_image}[{label}]({address}/{kind}/v{version}/{target})"

    return LINK.sub(absolute, text)


def description_for_index() -> str:
    """Return the description of the package on an index: README.md, installed without a clone."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    readme = (ROOT / "README.md").read_text()
    text = re.sub(r"(?<=\n## Install\n\n).*?(?=\n## )", INSTALL_FROM_INDEX, readme, flags=re.S)
    return with_absolute_links(text, read_address(), config["metadata"]["version"])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_regions(readme.read_text(), read_address()))
