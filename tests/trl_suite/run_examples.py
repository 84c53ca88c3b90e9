"""Runs TRL's examples for two steps each: `run_examples.py LIST`, a file of JSON with names, files, and arguments.

`TRL_SUITE_TRAINERS` names the trainers, `TRL_SUITE_RESULTS` the file of outcomes. Each example runs in a process that
is forked after the imports.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import trl
from replaced_names import replace_trainers
from trl.trainer.base_config import _BaseConfig


SHORT = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
SHORT |= {"use_vllm": False}
AT_MOST = {"max_completion_length": 16, "per_device_train_batch_size": 8}
finish = _BaseConfig.__post_init__


def shorten(config) -> None:
    for key, value in SHORT.items():
        setattr(config, key, value)
    for key, limit in AT_MOST.items():
        setattr(config, key, min(getattr(config, key), limit))
    config.output_dir = tempfile.mkdtemp()
    finish(config)


def run(name: str, file: str, arguments: list[str]) -> None:
    sys.argv = [file, *arguments]
    record = {"test": name, "outcome": "passed"}
    try:
        runpy.run_path(file, run_name="__main__")
    except BaseException as error:
        record |= {"outcome": "failed", "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    print(record["outcome"], name, record.get("error", "")[:300], flush=True)
    with Path(os.environ["TRL_SUITE_RESULTS"]).open("a") as results:
        results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    _BaseConfig.__post_init__ = shorten
    replace_trainers(os.environ["TRL_SUITE_TRAINERS"])
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        trainer.push_to_hub = lambda self, *args, **kwargs: None
    forking = multiprocessing.get_context("fork")
    for example in json.loads(Path(sys.argv[1]).read_text()):
        process = forking.Process(target=run, args=example)
        process.start()
        process.join()
