"""Runs a file of TRL's examples for two steps: `run_example.py FILE [ARGUMENTS]`.

`TRL_SUITE_TRAINERS` names the trainers.
"""

import os
import runpy
import sys
import tempfile

from replaced_names import replace_trainers
from transformers import Trainer
from trl.trainer.base_config import _BaseConfig


SHORT = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "use_vllm": False,
}
AT_MOST = {"max_completion_length": 16, "per_device_train_batch_size": 8}
finish = _BaseConfig.__post_init__


def shorten(config) -> None:
    for key, value in SHORT.items():
        setattr(config, key, value)
    for key, limit in AT_MOST.items():
        setattr(config, key, min(getattr(config, key), limit))
    config.output_dir = tempfile.mkdtemp()
    finish(config)


_BaseConfig.__post_init__ = shorten
Trainer.push_to_hub = lambda self, *args, **kwargs: None
replace_trainers(os.environ["TRL_SUITE_TRAINERS"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
