"""PACS with a tool: the model may run Python programs, in the sandbox, before it answers.

Run `python examples/tools.py [--model MODEL] [--SETTING VALUE ...]` on one GPU (not tested on GPU) under Linux, which
the sandbox needs. Another tool is a function with type hints and a docstring that describes its arguments.
"""

from datasets import Dataset
from trl import TrlParser

from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rewards import math_reward, run_python


def digit_sum(base: int, exponent: int) -> dict:
    question = f"What is the sum of the digits of {base}^{exponent}? Put the answer into \\boxed{{}}."
    solution = sum(map(int, str(base**exponent)))
    return {"prompt": [{"role": "user", "content": question}], "solution": str(solution)}


parser = TrlParser(PACSConfig)
parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")  # its chat template has tools
parser.set_defaults(output_dir="outputs/tools", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=4)
parser.set_defaults(max_tool_calling_iterations=3, max_completion_length=1024)
args, names = parser.parse_args_and_config()

dataset = Dataset.from_list([digit_sum(base, exponent) for base in range(2, 40) for exponent in range(10, 50)])
trainer = PACSTrainer(names.model, math_reward, args, dataset, tools=[run_python])
trainer.train()
trainer.save_model()
