"""pass@k of a model on problems of your own, with 95 % intervals.

Run `python examples/evaluate.py --model outputs/lora [--num_samples 32]` on a GPU (not tested on GPU).
`pacs-trl evaluate` does it for benchmarks and files, with vLLM, stored samples, and tables.
"""

from argparse import ArgumentParser

from transformers import pipeline

from pacs_trl.evaluation import pass_at_k, pass_interval
from pacs_trl.verification import Verifier


def product(a: int, b: int) -> tuple[list[dict], str]:
    return [{"role": "user", "content": f"What is {a} * {b}? Put the answer into \\boxed{{}}."}], str(a * b)


parser = ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--num_samples", type=int, default=16)
parser.add_argument("--max_new_tokens", type=int, default=256)
args = parser.parse_args()

generate = pipeline("text-generation", args.model, max_new_tokens=args.max_new_tokens, return_full_text=False)
num_correct = []
with Verifier() as verifier:
    for prompt, solution in [product(a, b) for a in (7, 13) for b in (12, 17, 25)]:
        outputs = generate(prompt, num_return_sequences=args.num_samples, do_sample=True)
        completions = [output["generated_text"] for output in outputs]
        num_correct.append(verifier.grade(completions, [solution] * args.num_samples).count(1.0))

for k in (1, args.num_samples // 2):
    interval = pass_interval(pass_at_k(args.num_samples, num_correct, k))
    print(f"pass@{k}: {interval.mean:.3f} ({interval.lower:.3f} to {interval.upper:.3f})")
