"""Helpers of the notebooks: a check of installed packages, quiet libraries, pictures, and a live plot of training.

The package computes; this module only shows.
"""

import importlib.util
import io
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path


# tqdm asks for ipywidgets when it is first imported in a notebook
warnings.filterwarnings("ignore", message="IProgress not found")

from transformers import TrainerCallback  # noqa: E402


ROOT = Path(__file__).parents[1]

# What each extra of setup.cfg brings, as far as notebooks use it.
EXTRAS = {"matplotlib": "report", "IPython": "dev"}


def prepare(*modules: str) -> None:
    """
    Check that `modules` are installed, go to the root of the repository, and turn off progress bars and warnings.

    Raises:
        `ImportError`: if one is missing, with the command that installs it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({EXTRAS[name] for name in missing}))
        raise ImportError(
            f"This notebook needs {', '.join(missing)}, which this kernel's Python does not have. Run `pip install -e "
            f"'.[{extras}]'` in the repository, with that Python, and restart the kernel."
        )
    os.chdir(ROOT)
    os.environ |= {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    warnings.filterwarnings("ignore")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def checking() -> bool:
    """Return whether `make notebooks` only checks that every cell runs, with few updates and problems."""
    return os.environ.get("NOTEBOOKS") == "check"


def pacs_trl(*words) -> None:
    """`pacs-trl WORDS` as in a terminal, with what it prints; an error ends the cell."""
    command = [sys.executable, "-m", "pacs_trl.cli", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="")
    if process.returncode:
        raise RuntimeError(f"pacs-trl {words[0]} ended with exit code {process.returncode}; its message stands above.")


def picture(figure_or_file):
    """A matplotlib figure, or the first file that a function of `report.plots` has written, as an output of a cell."""
    from IPython.display import Image

    if isinstance(figure_or_file, list):
        return Image(data=figure_or_file[0].read_bytes(), width=700)
    content = io.BytesIO()
    figure_or_file.savefig(content, dpi=150)
    return Image(data=content.getvalue(), width=700)


class LivePlot:
    """
    One panel per logged quantity, redrawn while training runs; several runs share the panels.

    Args:
        keys (sequence of `str`): Names in the trainer's log.
        every (`int`): Logged steps between two drawings.

    Example:

    ```python
    live = LivePlot(["reward", "entropy"])
    trainer = PACSTrainer(..., callbacks=[live.follow("PACS")])
    ```
    """

    def __init__(self, keys: Sequence[str], *, every: int = 5):
        self.keys, self.every = list(keys), every
        self.runs: dict[str, list[dict[str, float]]] = {}
        self._display = None

    def follow(self, name: str) -> TrainerCallback:
        """A callback that adds what is logged to the run `name`."""
        return _Follower(self, name)

    def draw(self) -> None:
        from IPython.display import display

        shown = picture(self.figure())
        if self._display is None:
            self._display = display(shown, display_id=True)
        else:
            self._display.update(shown)

    def figure(self, x: str = "step"):
        """The figure as it stands, over steps or `"seconds"`; thin lines are what was logged, thick ones running
        means."""
        import matplotlib
        from matplotlib.figure import Figure

        from pacs_trl.report import plots

        with matplotlib.rc_context(plots.STYLE):
            figure = Figure(figsize=(plots.PAGE_WIDTH, plots.PANEL_HEIGHT), layout="constrained")
            panels = figure.subplots(1, len(self.keys), squeeze=False)[0]
            for panel, key in zip(panels, self.keys, strict=True):
                for name, look in plots.looks(self.runs).items():
                    logged = [(log[x], log[key]) for log in self.runs[name] if key in log]
                    plots.draw_runs(panel, [logged], name, look)
                panel.set(title=key, xlabel="optimizer step" if x == "step" else x)
                plots.whole_steps(panel)
            panels[0].legend()
            return figure


class _Follower(TrainerCallback):
    def __init__(self, plot: LivePlot, name: str):
        self.plot, self.logs, self.began = plot, [], (time.monotonic(), time.process_time())
        plot.runs[name] = self.logs

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.monotonic(), time.process_time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        wall, processor = self.began
        times = {"seconds": time.monotonic() - wall, "processor_seconds": time.process_time() - processor}
        self.logs.append({**logs, **times, "step": state.global_step})
        if len(self.logs) % self.plot.every == 0:
            self.plot.draw()

    def on_train_end(self, args, state, control, **kwargs):
        self.plot.draw()
