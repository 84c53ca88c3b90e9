"""Which files of a folder go to the Hub, and what of their content: a list of what belongs to a model.

Logs, local settings, optimizer states, samples and whatever else lies in the folder stay where they are. Our own files go as
[`~redaction.published`] leaves them; weights, configuration and tokenizer go byte for byte, without the path they were loaded from.
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import yaml

from ..redaction import published
from ..report.inputs import read_json
from ..settings import read_mapping


WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
README_FILE, RESULTS_FILE, RECIPE_FILE, LOG_FILE = "README.md", "results.json", "recipe.yaml", "trainer_state.json"
TRAINING_FACTS_FILE, TRAINING_FIGURE, EVAL_RESULTS_FOLDER = "provenance.json", "training.png", ".eval_results"
# What belongs to a model, by its name in the top folder. Everything else stays where it is.
UPLOADED = (
    *WEIGHTS,
    *("*.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("config.json", "generation_config.json", "adapter_config.json", "configuration_*.py", "modeling_*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenization_*.py"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *(README_FILE, "LICENSE*", "NOTICE*"),
    *(RECIPE_FILE, RESULTS_FILE, LOG_FILE, TRAINING_FACTS_FILE, TRAINING_FIGURE),
)
UPLOADED_FOLDERS = {EVAL_RESULTS_FOLDER: "*.yaml", "additional_chat_templates": "*.jinja"}
# Where transformers and peft write the path that a model was loaded from.
PATHS_IN_CONFIGS = {
    "config.json": "_name_or_path",
    "tokenizer_config.json": "name_or_path",
    "adapter_config.json": "base_model_name_or_path",
}


def files_of_a_model(model_dir: Path, added: Sequence[str] = ()) -> list[str]:
    """Paths in the repository after a push, sorted; `added` are those that [`describe`] would write."""
    present = [path.name for path in model_dir.iterdir() if path.is_file()]
    chosen = {name for name in present if any(fnmatch(name, pattern) for pattern in UPLOADED)}
    for folder, pattern in UPLOADED_FOLDERS.items():
        chosen |= {f"{folder}/{path.name}" for path in (model_dir / folder).glob(pattern) if path.is_file()}
    return sorted({*chosen, *added})


def published_contents(model_dir: Path) -> dict[str, Path | bytes]:
    """What is uploaded: path in the repository to file, or to the content that may be published of it."""
    contents: dict[str, Path | bytes] = {name: model_dir / name for name in files_of_a_model(model_dir)}
    if RECIPE_FILE in contents:
        settings = published(read_mapping(model_dir / RECIPE_FILE, "recipe"))
        contents[RECIPE_FILE] = yaml.safe_dump(settings, allow_unicode=True).encode()
    for name in (RESULTS_FILE, LOG_FILE, TRAINING_FACTS_FILE, *PATHS_IN_CONFIGS):
        if name in contents:
            content = read_json(model_dir / name, dict)
            key = PATHS_IN_CONFIGS.get(name)
            clean = (
                published(content)
                if key is None
                else content | published({k: content[k] for k in (key,) if k in content})
            )
            if clean != content:  # otherwise byte for byte
                contents[name] = (json.dumps(clean, indent=2, ensure_ascii=False) + "\n").encode()
    return contents
