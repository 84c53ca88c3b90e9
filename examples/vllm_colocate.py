"""GRPO with vLLM in the trainer's process: one GPU generates and trains.

Install the extra `vllm`, then run `python examples/vllm_colocate.py [--model MODEL] [--SETTING VALUE ...]`, or on
several GPUs `accelerate launch examples/vllm_colocate.py`. Colocated vLLM ran on one H100, this script did not.
"""

from datasets import load_dataset
from trl import TrlParser

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.rewards import math_reward


parser = TrlParser(GRPOConfig)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--dataset", default="trl-lib/DeepMath-103K")
parser.set_defaults(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.4)  # of the GPU's memory
parser.set_defaults(max_completion_length=4096, vllm_max_model_length=5120)  # prompt and completion
parser.set_defaults(output_dir="outputs/vllm_colocate", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=8)
args, names = parser.parse_args_and_config()

dataset = load_dataset(names.dataset, split="train")
trainer = GRPOTrainer(names.model, math_reward, args, dataset)
trainer.train()
trainer.save_model()
