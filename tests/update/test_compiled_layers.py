"""Compiled decoder layers compute what eager layers do, in one graph for all passes; which runs compile, and which are
refused or step down."""

import copy
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.experts import tiny_experts
from support.models import LORA, TOKENIZER, relative_error, tiny_model
from support.rollouts import Replay, addition_dataset
from support.runs import Recorder, build_trainer
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import BitsAndBytesConfig, TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head

from pacs_trl import GRPOTrainer
from pacs_trl.baselines.ppo_config import PPOConfig
from pacs_trl.rollouts import exact_trainer, layer_compilation
from pacs_trl.rollouts.layer_compilation import compiles_layers
from pacs_trl.update import compiled_layers, startup_check
from pacs_trl.update.compiled_layers import CompiledLayers, num_graphs
from pacs_trl.update.forward_pass import ForwardPass
from pacs_trl.update.minibatch import FILLER
from pacs_trl.update.startup_check import compile_layers


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch):
    """Compile with the operators of eager layers, which needs no compiler and takes seconds."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")


@pytest.fixture(scope="module", autouse=True)
def fresh_graphs():
    trace = logging.getLogger("torch.__trace")  # which writes every step of a trace, as pytest takes any level
    trace.setLevel(logging.CRITICAL)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    trace.setLevel(logging.NOTSET)


def batch(generator: torch.Generator, *sizes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of these numbers of completions, with random lengths and tokens."""

    def sample(longest: int) -> list[int]:
        length = int(torch.randint(2, longest, (), generator=generator))
        return torch.randint(5, 150, (length,), generator=generator).tolist()

    prompts = [prompt for size in sizes for prompt in [sample(12)] * size]
    return prompts, [sample(24) for _ in prompts]


def gradients(model, forward_pass: ForwardPass, rows) -> dict[str, torch.Tensor]:
    """The gradient of a weighted sum of the log-probs of all tokens."""
    model.zero_grad()
    with torch.enable_grad(), forward_pass.attention():
        logps = torch.cat(forward_pass.compute_logps(model, *rows).logps)
        (logps * torch.linspace(-1.0, 2.0, len(logps))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def small(name: str) -> torch.nn.Module:
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="sdpa")
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


# Gradients ----------------------------------------------------------------------------------------------------------

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "never"])
@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("architecture", ["Qwen3", "Gemma", "GPTNeoX"])
def test_gradients_equal_those_of_eager_layers(architecture, dtype, with_adapter, packing):
    """Completions that share a prompt and others, with and without gradient checkpointing of both kinds."""
    model = small(architecture)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model = (
        get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        if with_adapter
        else model
    )
    model.to(dtype)
    forward_pass, generator = ForwardPass(model, CPU, packing=packing), torch.Generator().manual_seed(0)
    layers = CompiledLayers(forward_pass.model)
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
            model.enable_input_require_grads()
        for sizes in ((3, 2), (1, 1, 1)):
            rows = batch(generator, *sizes)
            expected = gradients(model, forward_pass, rows)
            forward_pass.compiled_layers = layers
            assert relative_error(gradients(model, forward_pass, rows), expected) < ROUNDING[dtype]
            forward_pass.compiled_layers = None
    assert num_graphs() > 0 and all("forward" not in vars(layer) for layer in layers.layers)


class CountAttention(TorchDispatchMode):
    """Number of calls of the kernel of packed attention."""

    calls = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.pacs_trl.packed_attention.default
        return func(*args, **(kwargs or {}))


def keep_attention(ctx, op, *args, **kwargs):
    is_attention = op is torch.ops.pacs_trl.packed_attention.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.slow
def test_selective_checkpointing_keeps_what_compiled_attention_returns():
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass, rows = ForwardPass(model, CPU), batch(torch.Generator().manual_seed(0), 3, 2)
    expected = gradients(model, forward_pass, rows)
    forward_pass.compiled_layers = CompiledLayers(model)
    calls = []
    for policy in (lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE, keep_attention):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        assert relative_error(gradients(model, forward_pass, rows), expected) < 1e-5
        with CountAttention() as count:
            gradients(model, forward_pass, rows)
        calls.append(count.calls)
    assert calls == [4, 2]  # of two layers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocasts", [True, False])
def test_compiled_half_precision_has_errors_like_eager(dtype, autocasts):
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU, autocast=lambda: torch.autocast("cpu", dtype, enabled=autocasts))
    rows = batch(torch.Generator().manual_seed(0), 3, 2)
    exact = gradients(model, ForwardPass(model, CPU), rows)
    if not autocasts:
        model.to(dtype)
    eager_error = relative_error(gradients(model, forward_pass, rows), exact)
    forward_pass.compiled_layers = CompiledLayers(model)
    assert 0 < relative_error(gradients(model, forward_pass, rows), exact) < 2 * eager_error


# Graphs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_passes_of_all_kinds_run_one_graph():
    """With and without gradient, in training and evaluation mode, checkpointed or not, in any number and length. The
    startup check has made it."""
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass, generator = ForwardPass(model, CPU), torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    assert compile_layers(forward_pass, model) is None
    for step in range(15):
        model.train(step % 3 > 0)
        model.gradient_checkpointing_disable()
        if step % 5 == 0:
            model.gradient_checkpointing_enable({"use_reentrant": step % 2 == 0})
            model.enable_input_require_grads()
        rows = batch(generator, *[(2, 3), (1, 1, 1), (1,), (4,), (1, 5, 2)][step % 4])
        if step % 2:
            gradients(model, forward_pass, rows)
        else:
            with torch.no_grad():
                forward_pass.compute_logps(model, *rows)
    with torch.no_grad():
        forward_pass.compute_logps(model, [FILLER.prompt_ids], [FILLER.completion_ids])
    assert num_graphs() == 1 and not counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_log_probs_do_not_depend_on_the_kind_of_pass(dtype):
    """Bit by bit, also where a compiler rounds differently in graphs with and without a gradient: there is one."""
    model = small("Qwen3").to(dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU)
    forward_pass.compiled_layers = CompiledLayers(model)
    rows = batch(torch.Generator().manual_seed(0), 3, 2)
    with_gradient = torch.cat(forward_pass.compute_logps(model, *rows).logps)
    before = num_graphs()
    with torch.no_grad():
        without = torch.cat(forward_pass.compute_logps(model, *rows).logps)
        in_evaluation = torch.cat(forward_pass.compute_logps(model.eval(), *rows).logps)
    assert with_gradient.requires_grad and not without.requires_grad and not in_evaluation.requires_grad
    assert torch.equal(with_gradient, without) and torch.equal(with_gradient, in_evaluation)
    assert num_graphs() == before and not any(module.training for module in model.modules())


def test_layers_with_dropout_keep_their_mode(monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model = small("Qwen3").eval()
    model.model.layers[1].self_attn.attention_dropout = 0.5
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU, packing="never")
    forward_pass.compiled_layers = CompiledLayers(model)
    rows = batch(torch.Generator().manual_seed(0), 2)
    first, second = (torch.cat(forward_pass.compute_logps(model, *rows).logps) for _ in range(2))
    assert torch.equal(first, second)


def test_generation_is_not_compiled():
    model = small("Qwen3").eval()
    before = num_graphs()
    CompiledLayers(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert num_graphs() == before


@pytest.mark.slow
@pytest.mark.parametrize("autocasts", [False, True])
def test_inductor_compiles_one_graph_with_equal_log_probs(monkeypatch, autocasts):
    """The compiler of real runs, on a CPU: gradients, one graph, and equal log-probs with and without gradient."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    if (missing := compiled_layers.missing_compiler(CPU)) is not None:
        pytest.skip(f"this machine lacks {missing}")
    torch._dynamo.reset()
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocasts)
    forward_pass, generator = ForwardPass(model, CPU, autocast=autocast), torch.Generator().manual_seed(0)
    rows = batch(generator, 3, 2)
    expected = gradients(model, forward_pass, rows)
    counters.clear()
    assert compile_layers(forward_pass, model) is None
    assert 0 < relative_error(gradients(model, forward_pass, rows), expected) < (0.1 if autocasts else 1e-5)
    for sizes in ((3, 2), (1, 1), (4,)):
        rows = batch(generator, *sizes)
        with_gradient = torch.cat(forward_pass.compute_logps(model, *rows).logps)
        with torch.no_grad():
            assert torch.equal(torch.cat(forward_pass.compute_logps(model, *rows).logps), with_gradient)
    assert num_graphs() == 1 and not counters["graph_break"]


# What does not compile ----------------------------------------------------------------------------------------------


def test_layers_that_do_not_trace_are_named(monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(startup_check, "MOST_GRAPHS", 1)
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU)

    def syncs(module, inputs):  # a graph ends at each of them
        return [inputs[0].sum().item() for _ in range(3)]

    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda *args: syncs(*args) and None)
    assert "do not trace" in compile_layers(forward_pass, model)
    assert forward_pass.compiled_layers is None


def test_errors_of_the_compiler_are_named(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU)
    assert "no such instruction" in compile_layers(forward_pass, model)
    assert forward_pass.compiled_layers is None and all("forward" not in vars(layer) for layer in model.model.layers)


def test_other_log_probs_are_named(monkeypatch):
    def wrong(graph, inputs):
        return lambda *args: [1.5 * x if torch.is_tensor(x) else x for x in graph(*args)]

    monkeypatch.setattr(compiled_layers, "BACKEND", wrong)
    model = small("Qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward_pass = ForwardPass(model, CPU)
    assert "log-probs differ by" in compile_layers(forward_pass, model)


def test_a_loss_of_routers_is_named():
    forward_pass = ForwardPass(small("Qwen3"), CPU)
    forward_pass.reads_routers = True
    assert "router_aux_loss_coef" in compile_layers(forward_pass, forward_pass.model)


def test_replaced_forward_methods_are_named():
    model = small("Qwen3")
    model.model.layers[1].forward = model.model.layers[1].forward
    assert "forward methods" in compile_layers(ForwardPass(model, CPU), model)


# Runs ---------------------------------------------------------------------------------------------------------------

OBSTACLES = {
    "torch_compile": "torch_compile: true compiles the whole model",
    "quantized": "quantized with bitsandbytes",
    "ZeRO-3": "ZeRO-3 gathers weights",
    "no compiler": "this machine lacks a compiler",
    "routers": "the loss of the routers",
}


def arguments(**settings) -> SimpleNamespace:
    """A configuration, for any device."""
    defaults = {"compile_layers": "auto", "torch_compile": False, "device": CPU, "process_index": 0}
    defaults |= {"is_exact": True, "router_aux_loss_coef": None}
    return SimpleNamespace(**(defaults | {"trust_remote_code": False, "model_init_kwargs": None} | settings))


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_prevents_compilation_is_refused_or_named(monkeypatch, caplog, case):
    monkeypatch.setattr(layer_compilation, "is_deepspeed_zero3_enabled", lambda: case == "ZeRO-3")
    monkeypatch.setattr(
        layer_compilation, "missing_compiler", lambda device: "a compiler" if case == "no compiler" else None
    )
    quantization = BitsAndBytesConfig(load_in_8bit=True) if case == "quantized" else None
    args = arguments(compile_layers=True, torch_compile=case == "torch_compile")
    model = tiny_experts() if case == "routers" else tiny_model()
    with pytest.raises(
        ValueError, match=f"compile_layers: true is not possible.*{OBSTACLES[case]}.*compile_layers: false"
    ):
        compiles_layers(model, args, quantization)
    args.compile_layers = "auto"
    with caplog.at_level(logging.WARNING):
        assert not compiles_layers(model, args, quantization)  # on a CPU
        assert caplog.messages == []
        args.device = torch.device("cuda")
        assert not compiles_layers(model, args, quantization)
    (message,) = caplog.messages
    assert OBSTACLES[case] in message and "compile_layers: auto" in message
    args.compile_layers = False
    assert not compiles_layers(model, args, quantization) and len(caplog.messages) == 1


def test_layers_are_compiled_on_a_gpu_by_default(monkeypatch):
    monkeypatch.setattr(layer_compilation, "missing_compiler", lambda device: None)
    args = arguments(device=torch.device("cuda"))
    assert compiles_layers(tiny_model(), args)
    args.device = CPU
    assert not compiles_layers(tiny_model(), args)


def test_a_machine_without_a_compiler_is_refused_before_the_model_is_loaded(model_path, tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"lacks a C\+\+ compiler.*Install it, or set compile_layers: false"):
        build_trainer(tmp_path, model=model_path, compile_layers=True)


def test_a_loss_of_routers_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("the model was loaded")

    tiny_experts().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
    experts = {"model": str(tmp_path / "model"), "trainer_class": GRPOTrainer}
    with pytest.raises(ValueError, match="loss of the routers.*Set router_aux_loss_coef: 0.0, or set compile_layers"):
        build_trainer(tmp_path, **experts, compile_layers=True)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant: false, or router_aux_loss_coef"):
        build_trainer(tmp_path, **experts, **reentrant)


def test_trainers_without_the_exact_update_refuse(tmp_path):
    with pytest.raises(ValueError, match="compile_layers: true is for the exact update.*Remove the key"):
        PPOConfig(tmp_path, use_cpu=True, bf16=False, compile_layers=True)
    assert PPOConfig(tmp_path, use_cpu=True, bf16=False).compile_layers == "auto"


@pytest.mark.parametrize("compile_layers", ["auto", True])
def test_a_model_that_does_not_trace_stops_the_run_or_is_named(tmp_path, monkeypatch, caplog, compile_layers):
    monkeypatch.setattr(exact_trainer, "compiles_layers", lambda *args: True)  # as on a GPU
    monkeypatch.setattr(layer_compilation, "compile_layers", lambda *args, **kwargs: "they do not trace")
    trainer = build_trainer(tmp_path, replay=Replay(), compile_layers=compile_layers)
    if compile_layers is True:
        with pytest.raises(ValueError, match="compile_layers: true.*they do not trace. Set compile_layers: false"):
            trainer.train()
        return
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert [m for m in caplog.messages if "they do not trace" in m and "compile_layers: auto" in m] == caplog.messages
    assert trainer.forward_pass.compiled_layers is None


RUNS = {
    "KL term": {"beta": 0.1},
    "snapshot": {"reference": "snapshot"},
    "reuse": {"steps_per_generation": 2, "num_iterations": 2, "group_layout": "split"},
    "checkpointing": {"gradient_checkpointing": True},
    "GRPO": {"trainer_class": GRPOTrainer, "beta": 0.1, "steps_per_generation": 2},
    "LoRA": {"beta": 0.1, "adapter": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_runs_equal_eager_ones(tmp_path, capsys, settings, bf16):
    """Gradients of all steps; proxies and the KL term of the first, whose reference has the same weights."""
    settings = {"max_steps": 4} | settings
    lora = {"peft_config": copy.deepcopy(LORA)} if settings.pop("adapter", False) else {}
    recorders = []
    for compiles in (False, True):
        recorders.append(Recorder())
        more = {"callbacks": [recorders[-1]], "peft_config": copy.deepcopy(lora.get("peft_config"))}
        torch.manual_seed(0)  # of the adapter
        run = {"compile_layers": compiles, "bf16": bf16, "more": more} | settings
        trainer = build_trainer(tmp_path / str(compiles), replay=Replay(), **run)
        names = set(trainer.model.state_dict())
        trainer.train()
    eager, compiled = recorders
    for step, expected in enumerate(eager.gradients):
        expected = {name: gradient for name, gradient in expected.items() if gradient is not None}
        assert relative_error(compiled.gradients[step], expected) < (0.05 if bf16 else 1e-5)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0].get("pacs/proxy_abs_mean", 0.0) == 0.0
    if "beta" in settings and not lora:
        assert logs[0]["kl"] == 0.0 and logs[-1]["kl"] > 0.0
    assert set(trainer.model.state_dict()) == names  # of eager layers
    output = capsys.readouterr().out
    assert output.count("Compiling the decoder layers") == output.count("Compiled them in") == 1


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_fifty_steps_make_no_new_graph(tmp_path, settings, bf16):
    """After the first step, with evaluations in between."""
    settings = settings | {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 8}
    more = {"peft_config": copy.deepcopy(LORA) if settings.pop("adapter", False) else None}
    more["eval_dataset"] = addition_dataset(4)
    counts, breaks = [], []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            counts.append(num_graphs())
            breaks.append(sum(counters["graph_break"].values()))

    more["callbacks"] = [Count()]
    run = {"max_steps": 50, "compile_layers": True, "bf16": bf16, "learning_rate": 1e-3} | settings
    build_trainer(tmp_path, replay=Replay(), more=more, **run).train()
    assert len(counts) == 50 and counts[-1] == counts[0] and breaks[-1] == breaks[0]
