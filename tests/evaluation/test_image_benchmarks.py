"""Benchmarks whose problems have images."""

import base64
import json
from io import BytesIO

import pytest
import torch
from PIL import Image
from support.image_checkpoints import image_model, image_processor
from support.image_runs import picture

from pacs_trl.data.images import prompt_with_images
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import load_benchmark
from pacs_trl.evaluation.engines import TransformersEngine
from pacs_trl.evaluation.image_requests import openai_messages
from pacs_trl.evaluation.requests import SamplingSettings
from pacs_trl.evaluation.run import evaluate, requests_to_generate
from pacs_trl.update.prompt_images import process_prompt
from pacs_trl.verification import Verifier


@pytest.fixture
def benchmark_file(tmp_path):
    """Problems with one picture, two, and none; paths are relative to the file."""
    rows = []
    for i in range(6):
        picture(i).save(tmp_path / f"{i}.png")
        rows.append({"problem": f"{i}?", "answer": str(i), "images": [f"{i}.png", "0.png"][: i % 3]})
    path = tmp_path / "pictures.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def requests_of(path, n=2):
    args = EvaluationArguments("model", str(path), str(path.parent), n=n, prompt_instruction="", engine="transformers")
    benchmark = load_benchmark(str(path))
    return requests_to_generate(args, benchmark, set())


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3"])
def test_engine_generates_what_the_model_does_for_one_prompt_at_a_time(benchmark_file, model_type):
    processor = image_processor(model_type)
    model = image_model(model_type, processor.tokenizer).eval()
    engine = TransformersEngine(model, processor.tokenizer, batch_size=5, load_processor=lambda: processor)
    requests, settings = requests_of(benchmark_file), SamplingSettings(temperature=0.0, max_new_tokens=6)
    answers = dict((r[:2], list(c.token_ids)) for r, c in engine.generate(requests, settings))
    for request in requests[::2]:
        ids, images = process_prompt(processor, prompt_with_images({"prompt": request.prompt}))
        inputs = {} if images is None else dict(images.inputs)
        for name, types in {} if images is None else images.token_types.items():
            inputs[name] = torch.tensor(types)[None]
        expected = model.generate(input_ids=torch.tensor([ids]), **inputs, do_sample=False, max_new_tokens=6)
        assert answers[request[:2]] == expected[0, len(ids) :].tolist()


def test_problems_are_identified_by_their_pictures(benchmark_file):
    before = load_benchmark(str(benchmark_file))
    assert before.has_images and [len(problem.images) for problem in before.problems] == [0, 1, 2, 0, 1, 2]
    picture(9).save(benchmark_file.parent / "4.png")
    assert load_benchmark(str(benchmark_file)).source["digest"] != before.source["digest"]
    (benchmark_file.parent / "4.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="row 4: The image .*4.png.* cannot be read"):
        load_benchmark(str(benchmark_file))


def test_server_gets_the_content_of_pictures(benchmark_file):
    (message,) = openai_messages(requests_of(benchmark_file)[2].prompt)
    image, text = message["content"]
    assert text == {"type": "text", "text": "1?"}
    encoded = image["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert Image.open(BytesIO(base64.b64decode(encoded))).tobytes() == picture(1).tobytes()


def test_text_models_are_refused_before_they_are_loaded(benchmark_file, tmp_path, model_path):
    args = EvaluationArguments(str(model_path), str(benchmark_file), str(tmp_path / "out"), n=1, engine="transformers")
    with pytest.raises(ValueError, match="reads text alone"):
        evaluate(args, Verifier(), progress=False)
