"""PACS with LoRA on the mathematics problems of DeepMath.

Run `python examples/lora.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU). `output_dir` gets
the adapter, which `AutoPeftModelForCausalLM` loads.
"""

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rewards import math_reward


parser = TrlParser(PACSConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
parser.add_argument("--dataset", default="trl-lib/DeepMath-103K")
parser.set_defaults(output_dir="outputs/lora", learning_rate=1e-5, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=8)
parser.set_defaults(max_completion_length=1024)
args, names = parser.parse_args_and_config()

# Columns: `prompt` (messages) and `solution`, which `math_reward` compares with the last box of a completion.
dataset = load_dataset(names.dataset, split="train")
lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear")
trainer = PACSTrainer(names.model, math_reward, args, dataset, peft_config=lora)
trainer.train()
trainer.save_model()
