"""Which files of a folder go to the Hub, and what of their content: a list of what belongs to a model.

Logs, local settings, optimizer states, samples and whatever else lies in the folder stay where they are. Our own files go as
[`~redaction.published`] leaves them; weights, configuration and tokenizer go byte for byte, without the path they were loaded from.
"""

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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
# Where transformers and peft write the paths of files that a model was loaded from, under keys with these endings.
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json"),
)
_NAMES_A_PATH = re.compile(r"(path|file|dir)$")


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
    for name in (RESULTS_FILE, LOG_FILE, TRAINING_FACTS_FILE, *CONFIGS):
        if name in contents:
            content = read_json(model_dir / name)
            clean = _without_paths(content) if name in CONFIGS else published(content)
            if clean != content:  # otherwise byte for byte
                contents[name] = (json.dumps(clean, indent=2, ensure_ascii=False) + "\n").encode()
    return contents


def _without_paths(content: Any, key: str = "") -> Any:
    """A configuration in which local paths are shortened to a name; nothing else of it is changed."""
    if isinstance(content, dict):
        return {name: _without_paths(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_paths(item, key) for item in content]
    is_path = isinstance(content, str) and _NAMES_A_PATH.search(key)
    return published({"path": content})["path"] if is_path else content
