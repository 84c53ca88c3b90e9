"""A task with images that trains on two CPU cores: how many squares does a picture have?

    python -m experiments.shapes
    accelerate launch --cpu -m pacs_trl.train --config recipes/images/shapes.yaml

The first command writes `outputs/shapes`: pictures with their questions, and a small random model of the architecture
of Gemma 3 with its processor, which supervised training has taught to answer, mostly wrongly. Nothing is downloaded.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from experiments.miniature.tokenizer import CHAT_TEMPLATE, build_tokenizer


QUESTION = "How many squares?"
CELLS, CELL, MOST = 4, 7, 4  # a square lies in a cell of a grid; pixels of a cell; largest number of squares
TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}


def picture(rng: np.random.Generator) -> tuple[Image.Image, int]:
    """Return a picture of 28 x 28 pixels, and its number of squares, 1 to `MOST`."""
    number = int(rng.integers(1, MOST + 1))
    pixels = np.full((CELLS * CELL, CELLS * CELL, 3), rng.integers(0, 80, 3), dtype=np.uint8)
    for cell in rng.choice(CELLS * CELLS, number, replace=False):
        top, left = (int(index) * CELL + int(rng.integers(0, 2)) for index in divmod(int(cell), CELLS))
        pixels[top : top + 5, left : left + 5] = rng.integers(150, 256, 3)
    return Image.fromarray(pixels), number


def build_processor() -> Gemma3Processor:
    """Return a processor of such pictures, with one token per cell."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    tokenizer._set_model_specific_special_tokens(special_tokens={**TOKENS})
    blocks = "{%- for block in message.content %}{{- block.text or '<start_of_image>' }}{%- endfor %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{- message.content + '<|im_end|>' }}", f"{blocks}<|im_end|>")
    size = {"height": CELLS * CELL, "width": CELLS * CELL}
    images = Gemma3ImageProcessorPil(size=size)
    return Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=CELLS * CELLS)


def build_model(processor: Gemma3Processor, seed: int) -> Any:
    """Return a random model of 0.2 million weights."""
    tokenizer = processor.tokenizer
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"max_position_embeddings": 256, "sliding_window": 256, "layer_types": ["full_attention"] * 2}
    text |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": CELLS * CELL, "patch_size": CELL}
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=CELLS * CELLS, **ids
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def supervise(model: Any, processor: Gemma3Processor, rng: np.random.Generator, num_steps: int) -> float:
    """Train a model on `num_steps` batches of 32 new pictures with their answers. Returns the last loss in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.tensor(0.0)
    for _ in range(num_steps):
        pictures, numbers = zip(*(picture(rng) for _ in range(32)), strict=True)
        prompts: list[Any] = [[{"role": "user", "content": _blocks(image)}] for image in pictures]
        how: dict[str, Any] = {
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
            "add_generation_prompt": True,
        }
        batch: Any = processor.apply_chat_template(prompts, **how)
        inputs: dict[str, torch.Tensor] = dict(batch)
        answers = torch.tensor([processor.tokenizer(f"{number}<|im_end|>")["input_ids"] for number in numbers])
        length = inputs["input_ids"].shape[1]
        for name, more in (("input_ids", answers), ("attention_mask", torch.ones_like(answers))):
            inputs[name] = torch.cat([inputs[name], more], dim=1)
        inputs["token_type_ids"] = torch.cat([inputs["token_type_ids"], torch.zeros_like(answers)], dim=1)
        logits = model(**inputs).logits[:, length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def _blocks(image: Image.Image) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/shapes"))
    parser.add_argument("--num_pictures", type=int, default=1024)
    parser.add_argument("--num_steps", type=int, default=150, help="supervised training, before that of the recipe")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    rng = np.random.default_rng(args.seed)
    (args.output_dir / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(args.num_pictures):
        image, number = picture(rng)
        image.save(args.output_dir / "pictures" / f"{i}.png")
        lines.append(json.dumps({"problem": QUESTION, "image": f"pictures/{i}.png", "answer": str(number)}))
    (args.output_dir / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    processor = build_processor()
    model = build_model(processor, args.seed)
    loss = supervise(model, processor, rng, args.num_steps)
    model.save_pretrained(args.output_dir / "model")
    processor.save_pretrained(args.output_dir / "model")
    print(f"{args.num_pictures} pictures and a model (loss {loss:.2f} nats per token) are in {args.output_dir}.")


if __name__ == "__main__":
    main()
