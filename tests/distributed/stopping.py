"""The reward function of `test_preemption.py`: SIGTERM to one rank, or to the launcher, in the middle of a step."""

import os
import signal

from replay import digit_reward


def reward(completions, trainer_state, **kwargs):
    rank, target = os.environ["RANK"], os.environ["STOPPING"]
    if target == "one rank" and rank == "1" and trainer_state.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if target == "launcher" and rank == "0" and trainer_state.global_step == 4:
        os.kill(os.getppid(), signal.SIGTERM)
    return digit_reward(completions)
