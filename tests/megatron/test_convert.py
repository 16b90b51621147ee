"""The two conversion commands, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from sleuth.arguments import ModelArgs
from sleuth.arguments.hf_config import Llama3Scaling
from sleuth.megatron import convert, probe, weights
from sleuth.megatron.attention import rotary_frequencies
from sleuth.megatron.checkpoint import load_weights
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf, write_hf_folder
from sleuth.megatron.model import ModelShape, RMSNorm, layer_spec
from tests.megatron.harness import Task, run_tasks
from tests.tiny_models import Kind, make_tiny_model
from tools import convert_hf_to_torch_dist as to_torch_dist
from tools import convert_torch_dist_to_hf as to_hf

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


# --- the check after a conversion


def test_a_conversion_that_went_wrong_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "right")
    merge = weights._merge_qkv
    monkeypatch.setattr(weights, "_merge_qkv", lambda whole, groups: merge([whole[0], whole[2], whole[1]], groups))
    with pytest.raises(ValueError, match=r"a logit differs by \S+, expected at most \S+ \(0\.001 of the largest"):
        hf_to_torch_dist(model, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
    hf_to_torch_dist(model, tmp_path / "dist", check=False)
    monkeypatch.setattr(weights, "_merge_qkv", merge)
    split = weights._split_qkv
    monkeypatch.setattr(weights, "_split_qkv", lambda merged, shape: [split(merged, shape)[i] for i in (0, 2, 1)])
    with pytest.raises(ValueError, match="a logit differs"):
        torch_dist_to_hf(tmp_path / "right", model, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model", "right"]


def test_a_weight_that_is_refused_is_no_trouble_of_the_disk(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight in model\.safetensors holds NaN") as caught:
        hf_to_torch_dist(model, tmp_path / "dist")
    assert "are free there" not in str(caught.value)
    assert not (tmp_path / "dist").exists()


def test_a_place_that_cannot_be_written_to_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"--save: expected a folder that can be written, found .*/file; choose"):
            hf_to_torch_dist(model, tmp_path / place)
        with pytest.raises(ValueError, match=r"--save: expected a folder that can be written, found .*/file; choose"):
            torch_dist_to_hf(tmp_path / "dist", model, tmp_path / place)
    with pytest.raises(ValueError, match="is the folder of --hf-checkpoint"):
        hf_to_torch_dist(model, tmp_path / "here" / ".." / "model")
    with pytest.raises(ValueError, match="is the folder that this was started in"):
        torch_dist_to_hf(tmp_path / "dist", model, Path())


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for place in ("empty", "absent"):
        (tmp_path / place).symlink_to(tmp_path / "disk" / place)
        write_hf_folder({"a": torch.ones(3)}.items(), model, tmp_path / place, "float32")
        assert (tmp_path / place).is_symlink()
        assert (tmp_path / "disk" / place / "model.safetensors").is_file()


def test_what_does_not_fit_into_memory_is_not_checked_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**6))
    hf_to_torch_dist(model, tmp_path / "dist")
    assert "not checked: 0.0 billion parameters in float32 do not fit" in caplog.text


def test_not_a_number_is_a_difference() -> None:
    with pytest.raises(ValueError, match="differs by nan"):
        probe.compare(torch.tensor([[float("nan")]]), torch.ones(1, 1))


# --- what lies on the disk afterwards


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    before = os.umask(umask)
    try:
        write_hf_folder({"a": torch.ones(3)}.items(), model, tmp_path / "new", "float32")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {mode}


def test_weights_that_are_not_finite_are_named_and_not_written(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}
    with pytest.raises(ValueError, match="found NaN or infinite values in b"):
        write_hf_folder(tensors.items(), model, tmp_path / "new", "float32")
    assert not (tmp_path / "new").exists()


def test_an_export_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    model, save = make_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "new"

    def write(value: float, *, fail: bool = False, **options: Any) -> None:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for index in range(4):
                yield f"t{index}", torch.full((3,), value)
            if fail:
                raise ValueError("no more")

        write_hf_folder(tensors(), model, save, "float32", shard_bytes=12, **options)

    def held() -> float:
        return float(load_file(save / "model-00004-of-00004.safetensors")["t3"][0])

    with pytest.raises(ValueError, match="no more"):
        write(1.0, fail=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    write(1.0)
    with pytest.raises(OSError, match="not empty"):
        write(2.0)
    with pytest.raises(ValueError, match="no more"):
        write(2.0, replace=True, fail=True)
    assert held() == 1.0
    child = os.fork()
    if child == 0:  # a kill in the middle
        write(3.0, replace=True, verify=lambda folder: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert held() == 1.0
    write(4.0, replace=True)
    assert held() == 4.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new"]


MEASURE = """
import sys, threading, time
from pathlib import Path
from sleuth.megatron import streaming
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf

streaming.PIECE_BYTES = 30_000_000

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

root = Path(sys.argv[1])
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
hf_to_torch_dist(root / "model", root / "dist", check=False)
there = peak[0] - before
torch_dist_to_hf(root / "dist", root / "model", root / "back", check=False, shard_bytes=20_000_000)
print(there, peak[0] - before)
"""


def test_no_more_than_a_piece_is_in_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 4096}
    model = make_tiny_model(tmp_path / "model", "llama", **wide)
    size = (model / "model.safetensors").stat().st_size
    assert size > 250e6
    result = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    there, back = map(int, result.stdout.split())
    assert there < 0.25 * size  # a tensor
    assert back < 0.6 * size  # what is read at once, and a file


# --- bad input


def test_the_precision_may_change_on_loading(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist", dtype="bfloat16")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", dtype="float32")
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].bfloat16().float()), name


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    # A folder of several files is a source too.
    hf_to_torch_dist(tmp_path / "back", tmp_path / "again")
    expected, found = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, tmp_path / "back"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match=r"config\.json, found none at"):
        hf_to_torch_dist(tmp_path / "missing", tmp_path / "dist")
    with pytest.raises(ValueError, match=r"--num-layers: the flag says 36, the config.json of .* says 2"):
        hf_to_torch_dist(model, tmp_path / "dist", flags=ModelArgs(num_layers=36))
    hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match=r"expected the checkpoint .*iter_0000007"):
        torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", iteration=7)
    with pytest.raises(ValueError, match="is not empty"):
        torch_dist_to_hf(tmp_path / "dist", model, model)
    with pytest.raises(ValueError, match=r"found no latest_checkpointed_iteration"):
        torch_dist_to_hf(tmp_path, model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    other = make_tiny_model(tmp_path / "other", "qwen2", vocab_size=640)
    with pytest.raises(
        ValueError, match=r"embedding.word_embeddings.weight .* has shape \[512, 64\], expected \[640, 64\]"
    ):
        torch_dist_to_hf(tmp_path / "dist", other, tmp_path / "back")

    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:500].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight \[500, 64\] does not fit"):
        hf_to_torch_dist(model, tmp_path / "again")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"expected tensor model.norm.weight"):
        hf_to_torch_dist(model, tmp_path / "again")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="GB free"):
        torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model"]


def damage(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda model: damage(model / "model.safetensors", 5000), "model.safetensors is cut short or damaged"),
    "empty": (lambda model: damage(model / "model.safetensors", 0), "model.safetensors is empty; download it again"),
    "pickles": (
        lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
        "pytorch_model.bin; write safetensors with `python -c",
    ),
    "empty config": (lambda model: damage(model / "config.json", 0), "config.json: expected a JSON object, found an"),
    "half a config": (
        lambda model: damage(model / "config.json", 90),
        "config.json: expected a JSON object, found no",
    ),
    "no config": (lambda model: (model / "config.json").unlink(), "expected a model's folder with config.json"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_one_line(tmp_path: Path, name: str) -> None:
    spoil, message = BAD_MODELS[name]
    model = make_tiny_model(tmp_path / "model", "qwen2")
    spoil(model)
    for tool, words in ((to_torch_dist, []), (to_hf, ["--load", str(tmp_path / "dist")])):
        if tool is to_hf and "config" not in name:
            continue  # it reads no weights of the model
        with pytest.raises(SystemExit) as caught:
            tool.main(["--hf-checkpoint", str(model), "--save", str(tmp_path / "new"), *words])
        assert str(caught.value.code).startswith("error: ")
        assert message in str(caught.value.code)
        assert "\n" not in str(caught.value.code)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp", "metadata.json", "common.pt"])
@pytest.mark.parametrize("keep", [None, 0, 100])
def test_a_damaged_checkpoint_is_an_error(tmp_path: Path, pattern: str, keep: int | None) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    found = hf_to_torch_dist(model, tmp_path / "dist", check=False)
    (path,) = found.glob(pattern)
    path.unlink() if keep is None else damage(path, keep)
    with pytest.raises(SystemExit) as caught:
        to_hf.main(["--load", str(found.parent), "--hf-checkpoint", str(model), "--save", str(tmp_path / "new")])
    assert str(caught.value.code).startswith("error: ")
    assert str(found) in str(caught.value.code)
    assert not (tmp_path / "new").exists()


def test_a_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    other = make_tiny_model(tmp_path / "other", "qwen2", num_hidden_layers=3, rms_norm_eps=1e-5)
    map_of_model = SimpleNamespace(shape=ModelShape.from_hf(model))
    with pytest.raises(ValueError, match=r"num_layers is 3, expected 2, norm_epsilon is 1e-05, expected 1e-06"):
        weights.load_hf_weights(map_of_model, other)  # type: ignore[arg-type]


def test_the_commands_fail_with_one_line(tmp_path: Path) -> None:
    result = run_tool(
        "convert_torch_dist_to_hf.py", "--load", tmp_path, "--hf-checkpoint", tmp_path, "--save", tmp_path / "x"
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: --hf-checkpoint: expected a model's folder")
    assert "Traceback" not in result.stderr
