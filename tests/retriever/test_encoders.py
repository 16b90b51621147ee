"""Encoders, beside transformers' own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from local_dense_retriever import encoders
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.presets import PRESETS, EncoderConfig, encoder_config
from tests.retriever.minilm import contents, minilm

MINILM = encoder_config("minilm").model
SHORT = ["who wrote Hamlet?", "a", "", "  \n", "x " * 3000, "Zürich 北京 🙂", "capital of France"]


def plain(model: Any, tokenizer: Any, text: Any, pooling: str, normalize: bool, limit: int = 256) -> np.ndarray:
    """One text's embedding [d], without batches or padding."""
    batch = tokenizer(*text, return_tensors="pt", truncation=True, max_length=limit)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        output = model(**batch)
    if pooling == "pooler":
        vector = output.pooler_output[0]
    else:
        hidden = output.last_hidden_state[0]
        vector = hidden.mean(0) if pooling == "mean" else hidden[0]
    return (vector / vector.norm() if normalize else vector).numpy()


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    model = transformers.AutoModel.from_pretrained(MINILM, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(MINILM)


def test_embeddings_equal_a_plain_forward(reference: tuple[Any, Any]) -> None:
    texts = contents(60) + SHORT
    embeddings = minilm().encode_passages(texts)
    expected = np.stack([plain(*reference, (text,), "mean", True) for text in texts])
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, expected, atol=1e-5)
    np.testing.assert_allclose(minilm().encode_queries(SHORT), expected[60:], atol=1e-5)


@pytest.mark.parametrize(("pooling", "normalize"), [("cls", True), ("pooler", False), ("mean", False)])
def test_pooling_prefix_and_length(reference: tuple[Any, Any], pooling: str, normalize: bool) -> None:
    config = EncoderConfig(MINILM, query_prefix="query: ", passage_prefix="passage: ", pooling=pooling, max_length=32)  # type: ignore[arg-type]
    encoder = Encoder(EncoderConfig(**{**config.__dict__, "normalize": normalize}), device="cpu")
    for prefix, encode in (("query: ", encoder.encode_queries), ("passage: ", encoder.encode_passages)):
        expected = [plain(*reference, (prefix + text,), pooling, normalize, 32) for text in contents(5)]
        np.testing.assert_allclose(encode(contents(5)), np.stack(expected), atol=1e-5)


@pytest.mark.parametrize(("batch_size", "tokens", "threads"), [(1, 2048, 1), (7, 300, 2), (64, 10, 3)])
def test_batches_do_not_matter(batch_size: int, tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CPU_BATCH_TOKENS", tokens)
    encoder = Encoder(minilm().config, device="cpu", batch_size=batch_size, threads=threads)
    np.testing.assert_allclose(encoder.encode_passages(contents(30)), minilm().encode_passages(contents(30)), atol=1e-5)


def test_half_of_a_surrogate_pair_is_a_question_mark() -> None:
    found = minilm().encode_passages(["ready \ud800 to go", "ready ? to go"])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_no_text_gives_no_row() -> None:
    assert minilm().encode_queries([]).shape == (0, 384)


def test_what_a_checkpoint_says_counts_and_can_be_overridden() -> None:
    config = encoder_config("mine", MINILM)
    assert (config.pooling, config.normalize, config.max_length) == ("mean", True, 256)
    config = encoder_config("mine", MINILM, pooling="cls", normalize=False, query_prefix="q: ", max_length=None)
    assert (config.pooling, config.normalize, config.query_prefix, config.max_length) == ("cls", False, "q: ", 256)


def test_presets() -> None:
    assert encoder_config("e5") == PRESETS["e5"]
    assert encoder_config("e5", "intfloat/e5-large-v2").query_prefix == "query: "
    assert encoder_config("bge").pooling == "cls"
    assert encoder_config("dpr").passage_model == "facebook/dpr-ctx_encoder-single-nq-base"
    with pytest.raises(ValueError, match="expected one of: e5, bge, dpr"):
        encoder_config("e6")
    with pytest.raises(ValueError, match="pooling: found 'max'"):
        encoder_config("e5", pooling="max")


def save_tiny(folder: Path, family: Any, config: Any) -> Any:
    torch.manual_seed(1)
    model = family(config).eval()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return model


def test_dpr_has_a_model_for_passages_of_title_and_text(tmp_path: Path) -> None:
    config = transformers.DPRConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    queries = save_tiny(tmp_path / "q", transformers.DPRQuestionEncoder, config)
    passages = save_tiny(tmp_path / "p", transformers.DPRContextEncoder, config)
    encoder = Encoder(encoder_config("dpr", str(tmp_path / "q"), passage_model=str(tmp_path / "p")), device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    expected = plain(queries, tokenizer, ("who?",), "pooler", False, 512)
    np.testing.assert_allclose(encoder.encode_queries(["who?"])[0], expected, atol=1e-5)
    expected = plain(passages, tokenizer, ("Title", "some text"), "pooler", False, 512)
    np.testing.assert_allclose(encoder.encode_passages(['"Title"\nsome text'])[0], expected, atol=1e-5)
    assert encoder.encode_passages([]).shape == (0, 32)


def test_random_weights_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    save_tiny(tmp_path / "no_pooler", lambda c: transformers.BertModel(c, add_pooling_layer=False), config)
    Encoder(EncoderConfig(str(tmp_path / "no_pooler")), device="cpu")
    with pytest.raises(ValueError, match="would be random"):
        Encoder(EncoderConfig(str(tmp_path / "no_pooler"), pooling="pooler"), device="cpu")


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load the encoder .*--retriever_model"):
        Encoder(EncoderConfig(str(tmp_path)), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU"):
            Encoder(EncoderConfig(MINILM), device="cuda")
