"""Check of an installed wheel, outside the repository: `python tests/installed.py` with the interpreter that has it.

It imports every module. In a new folder it copies a recipe, plans, trains, evaluates, audits, reports, and prepares an
upload, with a tiny random model. It imports nothing of the repository and needs the extra `report`.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import walk_packages

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role + ': ' + message.content + '<end>' }}{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

SMALL = "--model_name_or_path model --num_generations 4 --per_device_train_batch_size 8"
COMMANDS = [
    "recipes",
    "recipes first_run/pacs qwen3-4b/pacs_one_node",
    f"plan --config recipes/first_run/pacs.yaml {SMALL}",
    f"train --config recipes/first_run/pacs.yaml {SMALL} --max_steps 1 --disable_tqdm true",
    "evaluate --config recipes/evaluation/first_run.yaml --model outputs/first_run/pacs "
    "--output_dir outputs/evaluation --max_problems 2 --n 2 --k 1 --max_new_tokens 8",
    "audit --completions saved.json --protocols authors",
    "report outputs/evaluation/results.json --output_dir outputs/report",
    "push --model outputs/first_run/pacs --repo user/name --results outputs/evaluation/results.json --dry_run",
]


def save_model(folder: Path) -> None:
    """Save a random model of 0.1 million parameters, and a tokenizer of bytes."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<end>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
    tokens = {"pad_token_id": fast.pad_token_id, "eos_token_id": fast.eos_token_id, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(vocabulary), **sizes, **heads, **tokens)).save_pretrained(folder)


def main() -> None:
    import pacs_trl
    from pacs_trl import cli  # light: the commands import the rest

    assert Path(pacs_trl.__file__).is_relative_to(sys.prefix), pacs_trl.__file__
    for module in walk_packages(pacs_trl.__path__, "pacs_trl."):
        import_module(module.name)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_model(Path("model"))
        Path("saved.json").write_text('[{"completion": "1", "solution": "2"}]')
        for command in COMMANDS:
            print("$ pacs-trl", command, flush=True)
            if command == "recipes":  # the script that pip made
                subprocess.run([Path(sys.executable).with_name("pacs-trl"), command], check=True)
                continue
            sys.argv = ["pacs-trl", *command.split()]
            assert (status := cli.main()) == 0, f"{command}: exit code {status}"
        assert Path("recipes/accelerate_configs/fsdp2.yaml").is_file()
        assert "2509.02522" in Path("outputs/first_run/pacs/README.md").read_text()
        results = json.loads(Path("outputs/evaluation/results.json").read_text())
        assert results["commit"] is None and results["versions"]["pacs_trl"] == version("pacs_trl")
        assert Path("outputs/report/tables.md").is_file() and Path("outputs/report/pass_at_k.png").is_file()
        os.chdir("/")
    print(f"pacs_trl {version('pacs_trl')} works outside the repository.")


if __name__ == "__main__":
    main()
