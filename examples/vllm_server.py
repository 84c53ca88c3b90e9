"""GRPO with a vLLM server: one GPU generates, the others train (not tested on GPU).

    VLLM_SERVER_DEV_MODE=1 CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-1.7B --max-model-len 5120 \\
        --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1
    CUDA_VISIBLE_DEVICES=1 python examples/vllm_server.py [--model MODEL] [--SETTING VALUE ...]

Waits for the server, and sends it the weights after each optimizer step. If the server dies, the state is saved:
restart it and continue as in resume.py.
"""

from datasets import load_dataset
from trl import TrlParser

from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.rewards import math_reward


parser = TrlParser(GRPOConfig)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--dataset", default="trl-lib/DeepMath-103K")
parser.set_defaults(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://localhost:8000")
parser.set_defaults(output_dir="outputs/vllm_server", learning_rate=1e-6, max_steps=200, logging_steps=1)
parser.set_defaults(num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=8)
parser.set_defaults(max_completion_length=4096)
args, names = parser.parse_args_and_config()

dataset = load_dataset(names.dataset, split="train")
trainer = GRPOTrainer(names.model, math_reward, args, dataset)
trainer.train()
trainer.save_model()
