"""A run that continues, bit by bit, where it was stopped: start this script again, as often as needed.

Run `python examples/resume.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU), stop it with
Ctrl-C, and run it again. A checkpoint has weights, optimizer, data order, random numbers, and unused rollouts.
"""

from contextlib import closing

from datasets import load_dataset
from trl import TrlParser

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rewards import math_reward
from pacs_trl.rollouts.checkpoint_files import last_resumable_checkpoint
from pacs_trl.rollouts.stop_on_signal import StopOnSignal


parser = TrlParser(PACSConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--dataset", default="trl-lib/DeepMath-103K")
parser.set_defaults(output_dir="outputs/resume", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4)
parser.set_defaults(max_completion_length=1024, save_steps=20, save_total_limit=2)
args, names = parser.parse_args_and_config()

dataset = load_dataset(names.dataset, split="train")
checkpoint = last_resumable_checkpoint(args.output_dir)  # None in a new run
with closing(StopOnSignal()) as stopping:  # a signal saves a checkpoint after the optimizer step
    trainer = PACSTrainer(names.model, math_reward, args, dataset, callbacks=[stopping])
    trainer.train(resume_from_checkpoint=checkpoint)
if stopping.stopped is None:
    trainer.save_model()
