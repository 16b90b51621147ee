"""The two conversion commands, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import sleuth.megatron  # noqa: F401  (before megatron)
from sleuth.arguments.hf_config import Llama3Scaling
from sleuth.megatron import convert, probe, weights
from sleuth.megatron.attention import rotary_frequencies
from sleuth.megatron.checkpoint import load_weights
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
from sleuth.megatron.model import ModelShape, RMSNorm, layer_spec
from tests.megatron.harness import Task, run_tasks
from tests.tiny_models import Kind, make_tiny_model

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
pytestmark = pytest.mark.megatron
ROOT = Path(__file__).resolve().parents[2]


def run_tool(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_round_trip_through_the_commands(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    there = run_tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", model, "--save", tmp_path / "dist", "--swiglu")
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "0"
    back = run_tool(
        "convert_torch_dist_to_hf.py",
        "--load", tmp_path / "dist", "--hf-checkpoint", model, "--save", tmp_path / "back",
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model, tmp_path / "back")
        )
    assert torch.equal(found, expected)
    text = "<search> who </search>\n\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(text) == AutoTokenizer.from_pretrained(model)(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_comes_back(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist", dtype=dtype)
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", dtype=dtype)
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype))), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": False},
    "qwen3_moe tied": {"tie_word_embeddings": True},
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "head_dim": 24},
    "llama 3": {"tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_parameters": LLAMA_3},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_comes_back_and_computes_the_same(tmp_path: Path, name: str) -> None:
    """The vocabulary is padded: it has more rows than the tokenizer words. The tools' own check passes, too."""
    model = varied_model(tmp_path / "model", name)
    found = hf_to_torch_dist(model, tmp_path / "dist")
    expected = probe.hf_logits(model, torch.float32)
    assert relative(checkpoint_logits(model, found), expected) < 1e-5
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back")
    assert_same_tensors(tmp_path / "back", model)


def test_llama_3_is_scored_exactly_far_from_the_beginning(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 8192, "rope_parameters": LLAMA_3}
    model = make_tiny_model(tmp_path / "model", "llama", **config)
    found = hf_to_torch_dist(model, tmp_path / "dist", check=False)
    ids = torch.arange(3000) * 7919 % 512
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(ids[None]).logits[0]
    assert relative(checkpoint_logits(model, found, ids), expected) < 1e-5
    # The test can fail: without the stretched frequencies it is another model.
    plain = checkpoint_logits(model, found, ids, rotary_scaling=None)
    assert relative(plain, expected) > 1e-3


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0, 1.0, 4.0, 8192), Llama3Scaling(32.0, 1.0, 4.0, 64)])
def test_llama_3s_frequencies_are_those_of_transformers(scaling: Llama3Scaling) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5} | asdict(scaling)
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    torch.testing.assert_close(rotary_frequencies(128, 5e5, scaling), expected, rtol=1e-6, atol=0)


# --- from any layout to any, and between processes with and without TransformerEngine

SP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "TP2": ("qwen2", 2, {"tensor_model_parallel_size": 2}),
    "PP2 tied": ("qwen2 tied", 2, {"pipeline_model_parallel_size": 2}),
    "TP2 q/k norms": ("qwen3", 2, {"tensor_model_parallel_size": 2}),
    "EP2": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
    "TP2 llama": ("llama", 2, {"tensor_model_parallel_size": 2}),
    "TP2 tied": ("qwen2 tied", 2, {"tensor_model_parallel_size": 2}),
    "PP2 llama tied": ("llama tied", 2, {"pipeline_model_parallel_size": 2}),
    "TP2 PP2 llama 3": ("llama 3", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2 SP EP2": ("qwen3_moe", 4, {**SP2, "expert_model_parallel_size": 2}),
    "PP2 EP2 tied": ("qwen3_moe tied", 4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "TP2 SP, experts too, PP2": (
        "qwen3_moe",
        4,
        {**SP2, "expert_tensor_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ),
}


def layout_task(rank: int, world: int, model: str, converted: str, save: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Load a converted checkpoint in a layout, and save in that layout. The reference may be in either format."""
    from tests.megatron.harness import make_args, new_trainer

    ids = list(range(3, 90, 2))
    scores = []
    for reference in (converted, model):
        trainer = new_trainer(make_args(model, world, ref_load=reference, save=save, **flags))
        scores.append(trainer.log_probs(ids, 1.0))
    trainer.save(1, {})
    trainer.finish_save()
    return {"converted": scores[0], "hf": scores[1]}


def varied_model(folder: Path, name: str) -> Path:
    """A model of `MODELS` whose norms are no ones: one that is lost or taken for another shows."""
    model = make_tiny_model(folder, name.split()[0], **MODELS[name])  # type: ignore[arg-type]
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for key, tensor in tensors.items():
        if "norm" in key:
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("layouts")
    found: dict[str, list[dict[str, Any]]] = {}
    for processes in (2, 4):
        names = [name for name, (_, world, _) in LAYOUTS.items() if world == processes]
        tasks = []
        for name in names:
            kind, _, flags = LAYOUTS[name]
            model = varied_model(root / name / "model", kind)
            hf_to_torch_dist(model, root / name / "dist", check=False)
            paths = {"model": str(model), "converted": str(root / name / "dist"), "save": str(root / name / "saved")}
            tasks.append(Task(layout_task, paths | {"flags": flags}))
        found |= dict(zip(names, run_tasks(processes, tasks), strict=True))
    return root, found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_reads_and_writes(name: str, layouts: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    root, results = layouts
    model = root / name / "model"
    with torch.no_grad():
        ids = torch.tensor(list(range(3, 90, 2)))
        logits = AutoModelForCausalLM.from_pretrained(model)(ids[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
    for out in results[name]:
        assert out["hf"] == out["converted"]
        torch.testing.assert_close(torch.tensor(out["hf"]), expected, atol=2e-5, rtol=0)
    torch_dist_to_hf(root / name / "saved", model, root / name / "back", check=False)
    assert_same_tensors(root / name / "back", model)


class NormedLinear(ColumnParallelLinear):
    """As TransformerEngine's: the norm before a linear layer is a part of it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        return super().forward(F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps), *rest, **options)


class StatefulNorm(RMSNorm):
    """As TransformerEngine's: it has an extra state."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.shape == (3,)


def engine_like_spec(config: Any, chunk: int | None = None) -> TransformerBlockSubmodules:
    """The names and extra states that a model of TransformerEngine's layers has."""
    block = layer_spec(config, chunk)
    assert isinstance(block, TransformerBlockSubmodules)
    (spec,) = {id(layer): layer for layer in block.layer_specs or []}.values()
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.sharded_state_dict_keys_map = {}
    layer.input_layernorm, attention.linear_qkv = IdentityOp, NormedLinear
    if config.num_moe_experts:
        layer.pre_mlp_layernorm = StatefulNorm
    else:
        layer.pre_mlp_layernorm, layer.mlp.submodules.linear_fc1 = IdentityOp, NormedLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = StatefulNorm
    block.layer_norm = StatefulNorm
    return block


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_checkpoints_with_and_without_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    model = make_tiny_model(tmp_path / "model", kind)
    expected = probe.hf_logits(model, torch.float32)
    plain = hf_to_torch_dist(model, tmp_path / "plain", check=False)
    with monkeypatch.context() as patch:
        patch.setattr("sleuth.megatron.model.layer_spec", engine_like_spec)
        engine_like = hf_to_torch_dist(model, tmp_path / "engine", check=False)
        assert relative(checkpoint_logits(model, engine_like), expected) < 1e-5
        assert relative(checkpoint_logits(model, plain), expected) < 1e-5
        torch_dist_to_hf(tmp_path / "plain", model, tmp_path / "plain back", check=False)
    names = load_sharded_metadata(str(engine_like))
    assert any(name.startswith("decoder.final_layernorm._extra_state") for name in names)
    assert relative(checkpoint_logits(model, engine_like), expected) < 1e-5
    torch_dist_to_hf(tmp_path / "engine", model, tmp_path / "engine back", check=False)
    for back in ("plain back", "engine back"):
        assert_same_tensors(tmp_path / back, model)


def test_the_first_checkpoints_of_mixtures_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They had the name of a dense layer's norm, as megatron's local layers have it."""
    model = varied_model(tmp_path / "model", "qwen3_moe")
    expected = probe.hf_logits(model, torch.float32)

    def first_spec(config: Any, chunk: int | None = None) -> Any:
        block = layer_spec(config, chunk)
        assert isinstance(block, TransformerBlockSubmodules)
        for layer in block.layer_specs or []:
            layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        return block

    with monkeypatch.context() as patch:
        patch.setattr("sleuth.megatron.model.layer_spec", first_spec)
        older = hf_to_torch_dist(model, tmp_path / "older", check=False)
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in load_sharded_metadata(str(older))
    assert relative(checkpoint_logits(model, older), expected) < 1e-5
    torch_dist_to_hf(tmp_path / "older", model, tmp_path / "back")
    assert_same_tensors(tmp_path / "back", model)


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Torch raises what is no Exception; without the look at its files beforehand it is told, too."""
    model = make_tiny_model(tmp_path / "model", "qwen2")
    found = hf_to_torch_dist(model, tmp_path / "dist", check=False)
    (path,) = found.glob("*.distcp")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"found it damaged: {path} has \d+ bytes instead of"):
        checkpoint_logits(model, found)
    with (
        convert._alone(),
        pytest.raises(ValueError, match=rf"checkpoint in {found} cannot be read .* copy it again or name an earlier"),
    ):
        probe.checkpoint_logits(convert._build(ModelShape.from_hf(model), "float32"), found)


def test_numbered_experts_are_those_of_a_list() -> None:
    """--moe-grouped-gemm: one layer of TransformerEngine's has the matrices of all experts of a rank."""
    shape: Any = SimpleNamespace(add_qkv_bias=False, qk_layernorm=False, num_experts=4)
    names = {ours: theirs for ours, theirs, _ in weights._layer_names(shape, range(2, 4))}
    assert names["mlp.experts.linear_fc1.weight1"] == ("mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight")
    for index in range(2):
        for part in ("fc1", "fc2"):
            listed = names[f"mlp.experts.local_experts.{index}.linear_{part}.weight"]
            assert names[f"mlp.experts.linear_{part}.weight{index}"] == listed


def checkpoint_logits(model: Path, found: Path, ids: Tensor | None = None, **changes: Any) -> Tensor:
    """What the trainer computes after its own way of loading."""
    shape = replace(ModelShape.from_hf(model), **changes)
    with convert._alone(), torch.no_grad():
        chunks = convert._build(shape, "float32")
        load_weights(chunks, found)
        return chunks[0].logits(probe._probe(shape.vocab_size) if ids is None else ids)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_precision_may_change_on_loading(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist", dtype="bfloat16")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", dtype="float32")
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].bfloat16().float()), name


def test_the_commands_fail_with_one_line(tmp_path: Path) -> None:
    result = run_tool(
        "convert_torch_dist_to_hf.py", "--load", tmp_path, "--hf-checkpoint", tmp_path, "--save", tmp_path / "x"
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: --hf-checkpoint: expected a model's folder")
    assert "Traceback" not in result.stderr
