"""Build the documentation site in FOLDER/VERSION, by default of outputs/site: `python docs/build.py [FOLDER]`.

Beside the folders of versions it writes versions.json, which the sidebar of each version offers, and an index.html
that leads to the version that was built last.
"""

import json
import shutil
import sys
from pathlib import Path

from check_links import broken_links
from sphinx.cmd.build import main as sphinx


ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "outputs/site"
REDIRECT = '<!doctype html>\n<meta http-equiv="refresh" content="0; url={version}/docs/index.html">\n'


def build(site: Path) -> int:
    """Build the current version into `site`; return 1 after a warning of Sphinx or with a broken link."""
    sys.path.insert(0, str(ROOT))
    from pacs_trl import __version__

    folder = site / __version__
    options = ["-b", "html", "-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(site) + "-doctrees"]
    status = sphinx([*options, str(ROOT), str(folder)])
    shutil.rmtree(site / "jupyter_execute", ignore_errors=True)  # myst-nb's copies of the notebooks
    if status:
        return status
    if broken := broken_links(folder):
        print(*broken, sep="\n")
        return 1
    versions = sorted((page.parents[1].name for page in site.glob("*/docs/index.html")), reverse=True)
    (site / "versions.json").write_text(json.dumps(versions) + "\n")
    (site / "index.html").write_text(REDIRECT.format(version=__version__))
    print(f"{folder / 'docs/index.html'}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(build(Path(*sys.argv[1:]) if sys.argv[1:] else SITE))
