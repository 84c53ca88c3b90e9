"""Datasets with images: the exact update against TRL's, splits into micro-batches, resumption, and strange images."""

import base64
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from PIL import Image as Picture
from support.image_checkpoints import image_model, image_processor, image_tokenizer, save_checkpoint
from support.image_runs import OURS, TRLS, build, picture, rows, trained
from support.rollouts import digit_reward
from support.scripted import run_recipe
from support.seeds import shifted
from support.trls_update import difference
from transformers import AutoProcessor, GenerationConfig, ProcessorMixin

import pacs_trl
from pacs_trl.data import PROMPT_INSTRUCTION
from pacs_trl.data.images import (
    has_images,
    image_digest,
    image_prompt_lengths,
    image_size,
    prompt_with_images,
    read_image,
    with_absolute_paths,
)
from pacs_trl.errors import UserError
from pacs_trl.plan.check import measure
from pacs_trl.recipe import Recipe
from pacs_trl.rollouts.image_checkpoints import check_settings_for_images
from pacs_trl.rollouts.image_prompts import ImagePrompts
from pacs_trl.update import forward_pass as forward_pass_module
from pacs_trl.update.forward_pass import ForwardPass, fused_head
from pacs_trl.update.generation import faster_generation
from pacs_trl.update.prompt_images import padded_image_inputs
from pacs_trl.update.startup_check import choose_forward_pass


def slow(*values: str) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def temporary_files_under_tmp_path(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", *slow("qwen3_vl", "smolvlm", "idefics3")])
def test_weights_are_those_of_trl(model_type):
    before, trls, _ = trained(TRLS, model_type)
    _, ours, trainer = trained(OURS["GRPO"], model_type)
    assert difference(ours, trls, before) < 3e-5
    changed = {name for name in before if not torch.equal(before[name], ours[name])}
    assert any("vis" in name for name in changed)  # the tower
    assert trainer.forward_pass.packing == (None if model_type == "gemma3" else "sdpa")


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}], ids=["without", "with a reference"])
@pytest.mark.slow
def test_weights_of_rloo_are_those_of_trl(tmp_path, settings):
    image_model("qwen2_5_vl", image_processor("qwen2_5_vl").tokenizer).save_pretrained(tmp_path / "model")
    settings = settings | {"model": str(tmp_path / "model")}
    before, trls, _ = trained((trl.RLOOTrainer, trl.RLOOConfig), "qwen2_5_vl", **settings)
    _, ours, _ = trained((pacs_trl.RLOOTrainer, pacs_trl.RLOOConfig), "qwen2_5_vl", **settings)
    assert difference(ours, trls, before) < 3e-5


@pytest.mark.slow
def test_weights_are_those_of_trl_with_a_reference_and_reused_rollouts(tmp_path):
    image_model("qwen2_5_vl", image_processor("qwen2_5_vl").tokenizer).save_pretrained(tmp_path / "model")
    settings = {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "max_steps": 4, "model": str(tmp_path / "model")}
    with patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch):
        before, trls, _ = trained(TRLS, "qwen2_5_vl", **settings)
        _, ours, _ = trained(OURS["GRPO"], "qwen2_5_vl", **settings)
    assert difference(ours, trls, before) < 3e-5


@pytest.mark.parametrize("method", ["REAL", *slow("RLOO", "MaxRL")])
@pytest.mark.slow
def test_other_objectives_do_not_depend_on_micro_batches(tmp_path, method):
    image_model("gemma3", image_processor("gemma3").tokenizer).save_pretrained(tmp_path / "model")
    trainers = getattr(pacs_trl, f"{method}Trainer"), getattr(pacs_trl, f"{method}Config")
    settings = {"model": str(tmp_path / "model"), "max_steps": 2, "generation_batch_size": 8, "beta": 0.1}
    before, whole, _ = trained(trainers, "gemma3", **settings)
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    _, split, _ = trained(trainers, "gemma3", **settings, **smaller)
    assert difference(split, whole, before) < 3e-5


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", *slow("gemma3", "idefics3")])
def test_gradients_do_not_depend_on_micro_batches(method, model_type):
    """With texts among prompts of one and two images."""
    mixed = rows((0, 2, 1, 0, 2, 1, 0, 1))
    settings = {"dataset": mixed, "generation_batch_size": 8, "num_generations": 4}
    before, whole, _ = trained(OURS[method], model_type, **settings, per_device_train_batch_size=8)
    smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    _, split, _ = trained(OURS[method], model_type, **settings, **smaller)
    assert difference(split, whole, before) < 3e-5


class Micro:
    """Completions of prompts with two images, one, and none, three of each; two prompts differ in their image alone.
    The sum of their log-probs has random weights."""

    def __init__(self, model_type: str):
        processor = image_processor(model_type)
        prompts_of = ImagePrompts()
        prompts_of.processing_class, prompts_of.chat_template, prompts_of.chat_template_kwargs = processor, None, {}
        examples = list(rows((2, 0, 1, 1)))
        examples[3]["prompt"] = examples[2]["prompt"]
        examples[3]["images"] = [picture(40).resize(examples[2]["images"][0].size)]
        processed = [prompts_of._process(prompt_with_images(example)) for example in examples]
        assert processed[2][0] == processed[3][0]  # the same tokens
        self.prompts, self.images = map(list, zip(*(pair for pair in processed for _ in range(3)), strict=True))
        generator = torch.Generator().manual_seed(shifted(1))
        draw = lambda n: torch.randint(0, 255, (n,), generator=generator).tolist()  # noqa: E731
        self.completions = [draw(2 + i) for i in range(len(self.prompts))]
        self.weights = [torch.randn(2 + i, generator=generator) for i in range(len(self.prompts))]
        self.model = image_model(model_type, processor.tokenizer).eval()
        self.image_prompt = prompts_of._small_image_prompt()

    def together(self, **how):
        """Log-probs and gradient of one micro-batch, and its forward pass."""
        self.model.zero_grad()
        forward_pass = ForwardPass(self.model, torch.device("cpu"), reads_images=True, **how)
        with fused_head(self.model), forward_pass.attention():
            logps = forward_pass.compute_logps(self.model, self.prompts, self.completions, self.images).logps
            torch.dot(torch.cat(logps), torch.cat(self.weights)).backward()
        return torch.cat(logps).detach(), gradient(self.model), forward_pass

    def alone(self):
        """The same from the model's logits for one sequence at a time."""
        self.model.zero_grad()
        logps = []
        for prompt, completion, part in zip(self.prompts, self.completions, self.images, strict=True):
            inputs = {} if part is None else dict(part.inputs)
            for name, types in {} if part is None else part.token_types.items():
                inputs[name] = torch.tensor([[*types, *[0] * len(completion)]])
            logits = self.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False, **inputs).logits[0]
            values = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]
            torch.dot(values, self.weights[len(logps)]).backward()
            logps.append(values.detach())
        return torch.cat(logps), gradient(self.model)


def gradient(model) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


PACKED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "smolvlm"]


@pytest.mark.parametrize(
    ("model_type", "packing"),
    [*((name, "auto") for name in PACKED), ("qwen2_5_vl", "never"), ("idefics3", "never"), ("gemma3", "auto")],
)
def test_a_micro_batch_has_the_logps_and_gradients_of_single_sequences(model_type, packing):
    micro = Micro(model_type)
    logps, gradients, forward_pass = micro.together(packing=packing)
    expected_logps, expected_gradients = micro.alone()
    assert forward_pass.packing == ("sdpa" if packing == "auto" and model_type in PACKED else None)
    assert (logps - expected_logps).abs().max() < 1e-4
    assert (gradients - expected_gradients).norm() < 1e-4 * expected_gradients.norm()


def test_images_of_a_group_are_encoded_once_where_completions_are_packed():
    micro, seen = Micro("qwen2_5_vl"), []
    hook = micro.model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["grid_thw"]), with_kwargs=True
    )
    with hook:
        micro.together()
    (grid,) = seen
    assert len(grid) == 4  # images of four prompts, with three completions each


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_startup_check_notices_wrong_packed_passes_with_images(monkeypatch, caplog, model_type):
    """Of positions that count on after an image, and of a model that attends in both directions inside images."""
    micro = Micro(model_type)
    monkeypatch.setattr(forward_pass_module, "packs_images", lambda config: True)
    if model_type == "qwen3_vl":
        plain = lambda self, prompt, images: np.arange(len(prompt))  # noqa: E731
        monkeypatch.setattr(ForwardPass, "_prompt_positions", plain)
    with fused_head(micro.model):
        forward_pass = ForwardPass(micro.model, torch.device("cpu"), reads_images=True)
        assert forward_pass.packing == "sdpa"
        choose_forward_pass(forward_pass, micro.model)
        assert forward_pass.packing == "sdpa"  # text alone does not tell
        choose_forward_pass(forward_pass, micro.model, image_prompt=micro.image_prompt)
        assert forward_pass.packing is None and "packed with fused head" in caplog.text


@pytest.mark.parametrize("packing", ["auto", "never"])
def test_placeholders_in_completions_are_read_as_padding(packing):
    """A model may generate one; it stands for no image."""
    micro = Micro("qwen2_5_vl")
    micro.completions = [[7, micro.model.config.image_token_id, 8, 9][: len(ids)] for ids in micro.completions]
    micro.weights = [torch.ones(len(ids)) for ids in micro.completions]
    with_placeholder, *_ = micro.together(packing=packing)
    micro.completions = [[7, 0, 8, 9][: len(ids)] for ids in micro.completions]
    with_padding, *_ = micro.together(packing=packing)
    is_second = torch.cat([torch.arange(len(ids)) == 1 for ids in micro.completions])
    torch.testing.assert_close(with_placeholder[~is_second], with_padding[~is_second])
    assert (with_placeholder - with_padding)[is_second].abs().min() > 0


def test_images_matter_and_are_kept_once_per_group():
    trainer = build(OURS["PACS"], "qwen2_5_vl")
    rollouts = []
    with patch.object(trainer.update, "schedule_minibatch", side_effect=lambda part: rollouts.extend(part) or 1 / 0):
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    groups = [[r.images for r in rollouts if r.group == group] for group in {r.group for r in rollouts}]
    assert all(len({id(images) for images in group}) == 1 for group in groups) and len(groups) == 2
    assert len({r.images.row for r in rollouts}) == 2
    for rollout in rollouts:
        row = trainer.train_dataset[rollout.images.row]
        again = trainer._process(prompt_with_images(row))
        assert again[0] == rollout.prompt_ids.tolist()
        assert all(torch.equal(tensor, again[1].inputs[name]) for name, tensor in rollout.images.inputs.items())


@pytest.mark.parametrize("method", ["PACS", *slow("GRPO")])
@pytest.mark.slow
def test_run_resumes_bit_by_bit_and_checkpoints_have_no_pixels(tmp_path, method):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_steps": 4, "recorded": False}
    _, straight, trainer = trained(OURS[method], "qwen2_5_vl", output_dir=str(tmp_path), **settings)
    checkpoint = tmp_path / "checkpoint-1"
    state = torch.load(next(checkpoint.glob("*_state_0.pt")), weights_only=True)
    saved = [rollout["images"] for rollout in state["rollouts"].values()]
    assert saved and all(set(images) == {"row"} for images in saved)
    resumed = build(OURS[method], "qwen2_5_vl", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(weights, straight[name]) for name, weights in resumed.model.named_parameters())
    assert (checkpoint / "processor_config.json").is_file() or (checkpoint / "preprocessor_config.json").is_file()
    assert trainer.processing_class.image_processor is not None


@pytest.mark.slow
def test_stream_of_images_resumes_bit_by_bit(tmp_path):
    """Rows of a stream have no index, so its checkpoints have the images."""
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_steps": 4, "recorded": False}
    stream = rows().to_iterable_dataset()
    _, straight, _ = trained(OURS["GRPO"], "qwen2_5_vl", dataset=stream, output_dir=str(tmp_path), **settings)
    resumed = build(OURS["GRPO"], "qwen2_5_vl", dataset=stream, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(weights, straight[name]) for name, weights in resumed.model.named_parameters())


def test_fast_generation_tells_images_of_equal_prompts_apart():
    trainer = build(OURS["GRPO"], "qwen2_5_vl")
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": content}]}
    processed = [trainer._process(prompt_with_images(row | {"image": picture(number)})) for number in (0, 6, 0, 6)]
    prompts, images = zip(*processed, strict=True)
    assert prompts[0] == prompts[1]
    ids = torch.tensor(prompts)
    inputs = padded_image_inputs(images, ids.shape[1]) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=trainer._tokenizer.pad_token_id)
    model = trainer.model.eval()
    with torch.no_grad():
        expected = model.generate(**inputs, generation_config=config)
        with faster_generation(model, fast=True, dtype=None):
            assert torch.equal(model.generate(**inputs, generation_config=config), expected)
    assert not torch.equal(expected[0], expected[1])


def test_tower_is_frozen_on_request():
    before, after, trainer = trained(OURS["GRPO"], "gemma3", freeze_vision_tower=True, recorded=False)
    tower = {name: p for name, p in trainer.model.named_parameters() if "vision" in name or "projector" in name}
    assert tower and not any(parameter.requires_grad for parameter in tower.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.slow
def test_adapters_reach_the_tower_unless_it_is_frozen(frozen):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    settings = {"more": {"peft_config": lora}, "freeze_vision_tower": frozen, "fast_generation": True}
    before, after, _ = trained(OURS["GRPO"], "gemma3", recorded=False, **settings)
    in_tower = {name for name in after if "vision" in name}
    assert bool(in_tower) != frozen
    assert all(not torch.equal(before[name], after[name]) for name in in_tower)


def test_reward_functions_and_table_of_completions_have_images(tmp_path):
    seen = []

    def reward(prompts, completions, images, number, **kwargs):
        seen.extend(zip(prompts, images, number, strict=True))
        return digit_reward(completions)

    mixed = rows((0, 2, 1, 2, 1, 2, 1, 0))
    settings = {"log_completions": True, "output_dir": str(tmp_path), "recorded": False, "max_steps": 4}
    trained(OURS["GRPO"], "qwen2_5_vl", dataset=mixed, reward=reward, **settings)
    assert {number for *_, number in seen} == {0, 1, 2}
    for prompt, images, number in seen:
        blocks = [block for block in prompt[0]["content"] if block["type"] == "image"] if number else []
        assert len(images) == len(blocks) == number
        assert all(isinstance(image, Picture.Image) for image in images)
    table = pd.read_parquet(sorted((tmp_path / "completions").glob("*.parquet"))[0])
    assert len(table) == 8 and "What is" in str(table["prompt"][0])


def test_an_evaluation_set_may_have_images_without_a_training_set_that_has(tmp_path):
    texts = rows((0,) * 8).remove_columns("images")
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "recorded": False}
    trainer = build(OURS["PACS"], "qwen2_5_vl", dataset=texts, more={"eval_dataset": rows()}, max_steps=1, **settings)
    trainer.train()
    assert any("eval_reward" in entry for entry in trainer.state.log_history)


# Images and datasets -------------------------------------------------------------------------------------------------


def strange_images() -> dict:
    deep = Picture.fromarray((np.arange(56 * 56).reshape(56, 56) * 20 % 65536).astype(np.uint16))
    return {
        "RGBA": picture(1, "RGBA"),
        "gray": picture(2, "L"),
        "palette": picture(3, "P"),
        "16 bits": deep,
        "one pixel": Picture.new("RGB", (1, 1), "red"),
        "one line": Picture.new("RGB", (1, 100), "red"),
    }


@pytest.mark.parametrize("model_type", ["idefics3", *slow("qwen2_5_vl", "gemma3")])
def test_strange_images_are_read(model_type):
    for name, image in strange_images().items():
        dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}], "image": image}] * 8)
        if name == "one line" and model_type == "qwen2_5_vl":
            continue  # refused by its processor
        trainer = build(OURS["GRPO"], model_type, dataset=dataset, recorded=False, max_steps=1)
        trainer.train()


def stored_forms(image: Picture.Image, path: Path, **settings) -> list:
    """An image as a PIL image, a path, content, and what a column of images has of a path."""
    image.save(path, **settings)
    return [Picture.open(path), str(path), {"bytes": path.read_bytes()}, {"path": str(path), "bytes": None}]


def test_sixteen_bits_keep_their_upper_half_in_any_form(tmp_path):
    deep = Picture.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
    dim = Picture.fromarray(np.array([[0, 1, 255]], dtype=np.uint16))
    for form in stored_forms(deep, tmp_path / "deep.png"):
        assert np.asarray(read_image(form))[0, :, 0].tolist() == [0, 1, 255]
    assert not np.asarray(read_image(dim)).any()  # nothing in the upper half, as in a picture with one bright pixel


def test_photos_are_upright_in_any_form(tmp_path):
    exif = Picture.Exif()
    exif[0x0112] = 6  # the camera was turned
    for form in stored_forms(Picture.new("RGB", (30, 60)), tmp_path / "photo.jpg", exif=exif):
        assert read_image(form).size == (60, 30) and image_size(form) == (30, 60)


def test_half_a_file_is_named_in_any_form(tmp_path):
    picture(1).resize((64, 64)).save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    half = tmp_path / "half.png"
    half.write_bytes(content[: len(content) // 2])
    for form in (str(half), {"bytes": half.read_bytes()}, {"path": str(half), "bytes": None}):
        with pytest.raises(UserError, match="cannot be read"):
            image_size(form)


def test_content_in_base64_is_longer_than_a_name_of_a_file(tmp_path):
    rng = np.random.default_rng(0)
    noise = Picture.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    noise.save(tmp_path / "noise.png")
    text = base64.b64encode((tmp_path / "noise.png").read_bytes()).decode()
    assert len(text) > 255 and with_absolute_paths({"image": text}, tmp_path) == {"image": text}
    assert np.array_equal(np.asarray(read_image(text)), np.asarray(noise)) and image_digest(text)


def test_null_and_empty_images_are_text():
    message = [{"role": "user", "content": "?"}]
    assert not has_images(Dataset.from_dict({"prompt": [message] * 2, "image": [None, None]}))
    assert not has_images(Dataset.from_dict({"prompt": [message] * 2, "images": [[], None]}))
    assert has_images(Dataset.from_dict({"prompt": [message] * 2, "images": [[], ["a.png"]]}))
    block = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}]
    assert has_images(Dataset.from_dict({"prompt": [block]}))
    for row in ({"image": None}, {"images": None}, {"images": []}, {}):
        assert prompt_with_images({"prompt": message} | row) == message


def test_lengths_of_prompts_are_those_that_the_model_reads():
    trainer = build(OURS["GRPO"], "qwen2_5_vl", dataset=rows((0, 2, 1, 3)), generation_batch_size=8)
    lengths = image_prompt_lengths("x", trainer.train_dataset, trainer.processing_class)
    assert lengths == [len(trainer._process(prompt_with_images(row))[0]) for row in trainer.train_dataset]
    with pytest.raises(ValueError, match=r"Row \d of train_dataset has a prompt of .* max_completion_length=480"):
        build(OURS["GRPO"], "qwen2_5_vl", dataset=rows(), max_completion_length=480)


def test_an_image_block_after_a_turn_of_text_has_the_image_of_the_row():
    """TRL would add a placeholder to the first text of a user as well, and then miss an image."""
    question = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    image = picture(0)
    filled = prompt_with_images({"prompt": [*turns, {"role": "user", "content": question}], "image": image})
    assert [block["type"] for message in filled for block in message["content"]] == ["text", "text", "image", "text"]
    assert filled[0]["content"] == [{"type": "text", "text": "Hello."}]
    assert filled[2]["content"][0]["image"].tobytes() == image.tobytes()
    assert turns[0]["content"] == "Hello." and question[0] == {"type": "image"}


BLOCK = {"type": "image"}
BROKEN = {
    "more placeholders than images": ({"content": [BLOCK, BLOCK], "images": ["a.png"]}, "2 image block.* 1 image"),
    "images without placeholders": (
        {"content": [{"type": "text", "text": "?"}], "images": ["a.png"]},
        "0 image block.* 1 image",
    ),
    "a broken file": ({"content": "?", "images": ["broken.png"]}, "broken.png.* cannot be read"),
    "no file": ({"content": "?", "images": ["absent.png"]}, "absent.png.* cannot be read"),
    "null among images": ({"content": "?", "images": ["a.png", None]}, "None is not an image"),
    "a placeholder in the text": ({"content": "<|image_pad|>?", "images": ["a.png"]}, "has '<.image_pad.>'"),
    "a placeholder in a text": ({"content": "<|image_pad|>?", "images": []}, "has '<.image_pad.>'"),
    "a long image": ({"content": "?", "images": ["long.png"]}, "processor rejects an image .*300 x 1 pixels"),
}


@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_rows_are_named_before_the_model_is_loaded(tmp_path, monkeypatch, row, words):
    monkeypatch.chdir(tmp_path)
    picture(0).save("a.png")
    Picture.new("L", (300, 1)).save("long.png")
    Path("broken.png").write_bytes(Path("a.png").read_bytes()[:20])
    good = {"prompt": [{"role": "user", "content": "?"}], "images": ["a.png"]}
    if isinstance(row["content"], list):
        good["prompt"] = [{"role": "user", "content": [BLOCK]}]
    bad = {"prompt": [{"role": "user", "content": row["content"]}], "images": row["images"]}
    with pytest.raises(ValueError, match=f"Row 1 of train_dataset: .*{words}"):
        build(OURS["GRPO"], "qwen2_5_vl", dataset=Dataset.from_list([good, bad]))


@pytest.mark.parametrize("value", [3, [["a.png"]], "a.png", {"bytes": None, "path": None}])
def test_values_that_are_no_images_are_named(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    picture(0).save("a.png")
    column = "images" if isinstance(value, list | str) else "image"
    row = {"prompt": [{"role": "user", "content": "?"}], column: value}
    with pytest.raises(UserError, match="Row 0 of train_dataset: .*(no list|not an image|cannot be read)"):
        build(OURS["GRPO"], "qwen2_5_vl", dataset=Dataset.from_list([row] * 8))


def test_adapters_of_the_tower_alone_are_an_error_where_it_is_frozen():
    lora = LoraConfig(target_modules=["qkv"])
    with pytest.raises(UserError, match="has qkv, and the trained part of the model has no such module"):
        build(OURS["GRPO"], "qwen2_5_vl", more={"peft_config": lora}, freeze_vision_tower=True)


def test_files_are_read_once_per_batch(tmp_path):
    picture(0).save(tmp_path / "a.png")
    row = {"prompt": [{"role": "user", "content": "?"}], "image": str(tmp_path / "a.png")}
    trainer = build(OURS["GRPO"], "idefics3", dataset=Dataset.from_list([row] * 8), max_steps=1)
    with patch("PIL.Image.open", wraps=Picture.open) as opened:
        trainer.train()
    opened.assert_called_once()


def test_unreachable_address_is_an_error_before_generation():
    row = {"prompt": [{"role": "user", "content": "?"}], "image": "http://127.0.0.1:9/a.png"}
    with pytest.raises(ValueError, match="127.0.0.1:9/a.png.* cannot be read"):
        build(OURS["GRPO"], "qwen2_5_vl", dataset=Dataset.from_list([row] * 8), recorded=False).train()


def test_settings_that_cannot_train_on_images_are_named(tmp_path):
    with pytest.raises(ValueError, match="tools.* not supported|not supported with tools"):
        build(OURS["GRPO"], "qwen2_5_vl", more={"tools": [print]})

    def likely(completions, compute_logps, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="'likely', which reads compute_logps"):
        build(OURS["GRPO"], "qwen2_5_vl", reward=likely)
    with pytest.raises(ValueError, match="processing_class is a .*reads text alone"):
        build(OURS["GRPO"], "qwen2_5_vl", more={"processing_class": image_processor("qwen2_5_vl").tokenizer})
    arguments = dict.fromkeys(("tools", "environment_factory", "rollout_func")) | {"reward_funcs": [digit_reward]}
    args = pacs_trl.PPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="PPOConfig"):
        check_settings_for_images(args, arguments)


def test_the_version_of_fsdp_with_images_is_that_of_trainer(tmp_path, monkeypatch):
    """Which is 2 unless `fsdp_config` says otherwise; with `accelerate launch` it is that of the launcher."""
    arguments = dict.fromkeys(("tools", "environment_factory", "rollout_func")) | {"reward_funcs": [digit_reward]}
    settings = {"bf16": False, "use_cpu": True, "fsdp": True}
    check_settings_for_images(pacs_trl.GRPOConfig(str(tmp_path), **settings), arguments)
    args = pacs_trl.GRPOConfig(str(tmp_path), fsdp_config={"version": 1}, **settings)
    with pytest.raises(ValueError, match=r"FSDP 1 \(set fsdp_version: 2\)"):
        check_settings_for_images(args, arguments)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    args = pacs_trl.GRPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match=r"FSDP 1 \(set fsdp_version: 2\)"):
        check_settings_for_images(args, arguments)


# Recipes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_words(tmp_path) -> list[str]:
    """A checkpoint with its processor, and questions about files beside them."""
    save_checkpoint("gemma3", tmp_path / "model", only_blocks=True)
    (tmp_path / "model" / "preprocessor_config.json").unlink()  # which is read first
    image_processor("gemma3", only_blocks=True).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = []
    for i in range(32):
        picture(i).save(tmp_path / "data" / f"{i}.png")
        images = {"image": f"{i}.png"} if i % 4 else {"image": None}
        lines.append(json.dumps({"problem": f"What is {i}?", "answer": str(i)} | images))
    (tmp_path / "data" / "questions.jsonl").write_text("\n".join(lines))
    return ["--dataset_name", str(tmp_path / "data" / "questions.jsonl"), "--eval_split_size", "4"]


def test_recipe_trains_on_files_of_images(tmp_path, recipe_words):
    words = [*recipe_words, "--max_prompt_length", "300", "--eval_strategy", "steps", "--eval_steps", "1"]
    words += ["--num_generations_eval", "2", "--method", "grpo", "--prompt_instruction", ""]
    settings = {"max_completion_length": 8, "recipe": "grpo.yaml", "freeze_vision_tower": "true"}
    trainer = run_recipe(tmp_path / "run", tmp_path / "model", *words, **settings)
    assert trainer._reads_images and isinstance(trainer.processing_class, ProcessorMixin)
    assert len(trainer.train_dataset) == 28
    again = AutoProcessor.from_pretrained(tmp_path / "run")
    assert type(again) is type(trainer.processing_class)


def test_plan_counts_the_tokens_of_images(tmp_path, recipe_words):
    words = {"model_name_or_path": str(tmp_path / "model"), "method": "grpo", "output_dir": str(tmp_path / "run")}
    words |= {"dataset_name": recipe_words[1], "max_completion_length": 8, "use_cpu": True, "bf16": False}
    with_images, errors = measure(Recipe.from_settings(words))
    assert not errors and with_images.number == 32
    text = f"<|im_start|>user\nWhat is 1? {PROMPT_INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    without = len(image_tokenizer("gemma3")(text)["input_ids"])
    assert max(with_images.lengths) > without and min(with_images.lengths) == without  # every fourth has no image


def test_images_with_a_text_model_are_refused_from_a_recipe(tmp_path, recipe_words, model_path):
    with pytest.raises(ValueError, match="train_dataset has images.*reads text alone"):
        run_recipe(tmp_path / "run", model_path, *recipe_words, max_completion_length=8)


def test_benchmarks_of_training_are_text(tmp_path, recipe_words):
    words = [*recipe_words, "--eval_benchmarks", recipe_words[1], "--eval_strategy", "steps"]
    with pytest.raises(ValueError, match="has images, and eval_benchmarks are text"):
        run_recipe(tmp_path / "run", tmp_path / "model", *words, max_completion_length=8, recipe="grpo.yaml")
