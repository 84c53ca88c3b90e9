"""Build steps that setup.cfg cannot describe: recipes in the wheel, and a README whose links work on an index."""

import configparser
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs"))

from address import description_for_index  # noqa: E402


class BuildWithRecipes(build_py):
    """Copy the recipes that setup.cfg names to `pacs_trl/recipes`; a checkout uses its own folder `recipes`."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        config = configparser.ConfigParser()
        config.read(ROOT / "setup.cfg")
        target = Path(self.build_lib, "pacs_trl", "recipes")
        shutil.rmtree(target, ignore_errors=True)
        for pattern in config["recipes"]["ship"].split():
            for file in sorted(ROOT.glob(f"recipes/{pattern}")):
                copy = target / file.relative_to(ROOT / "recipes")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithRecipes}, long_description=description_for_index())
