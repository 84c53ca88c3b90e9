"""Small random checkpoints that read images and text, with their tokenizers and processors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    SmolVLMProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from experiments.miniature.tokenizer import build_tokenizer
from support.seeds import shifted


QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")

# Tokens of the processors, and the text around an image in a prompt.
IMAGE_TOKENS = {
    **dict.fromkeys(QWENS, ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]),
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "idefics3": ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"],
    "smolvlm": ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "gemma4": ["<|image>", "<|image_soft|>", "<image|>"],
    "llama4": ["<|image_start|>", "<|patch|>", "<|image_end|>"],
}
PLACEHOLDERS = {
    **dict.fromkeys(QWENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "mistral3": "[IMG]",
    "gemma4": "<|image_soft|>",
    "llama4": "<|patch|>",
}

# Templates of which some know only lists of blocks.
_TEXT_OR_BLOCKS = "{%- if message.content is string %}{{ message.content }}{%- else %}BLOCKS{%- endif %}"
_BLOCKS = (
    "{%- for block in message.content %}{%- if block.type == 'image' %}PLACEHOLDER"
    "{%- elif block.type == 'text' %}{{ block.text }}{%- endif %}{%- endfor %}"
)
_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}CONTENT{{ '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def image_tokenizer(model_type: str, *, only_blocks: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of the miniature models with the tokens of a processor."""
    tokenizer = build_tokenizer()
    tokens = IMAGE_TOKENS[model_type]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    names = {"image_token": next(token for token in tokens if "image" in token.lower() or token == "[IMG]")}
    if model_type.startswith("qwen"):
        names = {"image_token": tokens[1], "video_token": tokens[3], "vision_start_token": tokens[0]}
        names |= {"vision_end_token": tokens[2]}
    if model_type == "gemma3":
        names = {"boi_token": tokens[0], "image_token": tokens[1], "eoi_token": tokens[2]}
    if model_type in ("idefics3", "smolvlm"):
        names = {"fake_image_token": tokens[0], "image_token": tokens[1], "global_image_token": tokens[2]}
    tokenizer._set_model_specific_special_tokens(special_tokens=names)  # with attributes for the ids, also when saved
    blocks = _BLOCKS.replace("PLACEHOLDER", "{{ '" + PLACEHOLDERS[model_type] + "' }}")
    content = blocks if only_blocks else _TEXT_OR_BLOCKS.replace("BLOCKS", blocks)
    tokenizer.chat_template = _TEMPLATE.replace("CONTENT", content)
    return tokenizer


def image_config(model_type: str, tokenizer: PreTrainedTokenizerFast, **text: Any) -> Any:
    """A configuration with two layers for text and one or two for images of 28 x 28 pixels."""
    ids = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[model_type])
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512}
    sizes |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 28}
    vision |= {"num_attention_heads": 2, "patch_size": 14}
    more: dict[str, Any] = {}
    if model_type.startswith("qwen"):
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
        sizes |= {"rope_parameters": rope}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 7}
        vision |= {"out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2}
        more = {"image_token_id": ids[1], "video_token_id": ids[3], "vision_start_token_id": ids[0]}
        more |= {"vision_end_token_id": ids[2]}
        if model_type == "qwen2_vl":
            vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1, "num_heads": 2, "patch_size": 7}
            vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
        elif model_type == "qwen2_5_vl":
            vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        else:
            vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    if model_type == "qwen3_5":
        vision.pop("deepstack_visual_indexes")
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        sizes |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        rope["partial_rotary_factor"] = 1.0
    if model_type == "gemma3":
        sizes |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        more = {"mm_tokens_per_image": 4, "boi_token_index": ids[0], "image_token_index": ids[1]}
        more |= {"eoi_token_index": ids[2], "image_token_id": ids[1]}
    if model_type in ("idefics3", "smolvlm"):
        sizes |= {"model_type": "llama"}
        more = {"image_token_id": ids[1], "scale_factor": 2}
    if model_type == "mistral3":
        sizes |= {"model_type": "mistral", "sliding_window": None}
        vision |= {"model_type": "pixtral", "head_dim": 16}
        more = {"image_token_index": ids[0], "spatial_merge_size": 2}
    if model_type == "gemma4":
        sizes |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}
        sizes |= {"use_bidirectional_attention": "vision"}
        vision |= {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16}
        more = {"image_token_id": ids[1], "boi_token_id": ids[0], "eoi_token_id": ids[2], "audio_config": None}
    if model_type == "llama4":
        sizes |= {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16}
        sizes |= {"num_local_experts": 2, "intermediate_size_mlp": 64}
        vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        more = {"image_token_index": ids[1]}
    return AutoConfig.for_model(model_type, text_config=sizes | text, vision_config=vision, **more)


def image_model(model_type: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **text: Any) -> Any:
    """A model of [`image_config`] in float32, with weights far from zero."""
    config = image_config(model_type, tokenizer, **text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shifted(seed))
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.1)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def image_processor(model_type: str, *, only_blocks: bool = False) -> Any:
    """A processor of images up to 56 x 56 pixels with Pillow alone, and without videos, which need torchvision."""
    tokenizer = image_tokenizer(model_type, only_blocks=only_blocks)
    template = {"chat_template": tokenizer.chat_template}
    if model_type.startswith("qwen"):
        pixels = {"size": {"shortest_edge": 14 * 14, "longest_edge": 56 * 56}}
        images = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, temporal_patch_size=2, **pixels)
        classes = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
        processor = classes.get(model_type, Qwen3VLProcessor)
        return without_videos(processor)(images, tokenizer, None, **template)
    if model_type == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        return Gemma3Processor(images, tokenizer, image_seq_length=4, **template)
    size = {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False}
    if model_type == "idefics3":
        return Idefics3Processor(Idefics3ImageProcessorPil(**size), tokenizer, image_seq_len=1, **template)
    with patch("transformers.models.smolvlm.processing_smolvlm.num2words", str, create=True):  # of times in videos
        processor = without_videos(SmolVLMProcessor)
        processor = processor(SmolVLMImageProcessorPil(**size), tokenizer, None, image_seq_len=1, **template)
    processor.video_processor = SimpleNamespace(num_frames=1, fps=1)  # defaults that its chat template method reads
    return processor


def without_videos(processor: type) -> type:
    parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
    return type(processor.__name__, (processor,), {"get_attributes": parts})


def save_checkpoint(model_type: str, directory: Path, *, only_blocks: bool = False) -> str:
    """Save a model with its tokenizer, and the file of an image processor."""
    tokenizer = image_tokenizer(model_type, only_blocks=only_blocks)
    image_model(model_type, tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (Path(directory) / "preprocessor_config.json").write_text('{"image_processor_type": "Some", "do_resize": true}')
    return str(directory)
