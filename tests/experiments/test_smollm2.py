import pytest

from experiments import smollm2


def test_interrupted_conversion_is_repeated_and_a_complete_one_is_kept(tmp_path, monkeypatch):
    folder, conversions = tmp_path / "models" / "model", []

    def convert(path, folder):
        conversions.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if len(conversions) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "gguf_file", lambda: None)
    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.prepare_model(folder)
    assert not folder.exists()
    for _ in range(2):
        assert smollm2.prepare_model(folder) == folder
        assert sorted(path.name for path in folder.parent.iterdir()) == [".model.lock", "model"]
    assert len(conversions) == 2


@pytest.mark.slow
@pytest.mark.skipif(not smollm2.FOLDER.is_dir(), reason="the model is not there; `make model` prepares it")
def test_converted_model_is_the_instruction_model():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.FOLDER)
    model = AutoModelForCausalLM.from_pretrained(smollm2.FOLDER)
    assert model.dtype == torch.bfloat16 and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert "quantization_config" not in model.config.to_dict()
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "left")
    # as the published tokenizer: digits and the space before them are tokens of their own
    assert tokenizer.tokenize(" 37+5 don't") == ["Ġ", "3", "7", "+", "5", "Ġdon", "'t"]
    assert tokenizer.decode(tokenizer("naïve 🌍\n")["input_ids"]) == "naïve 🌍\n"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
