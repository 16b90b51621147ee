"""--attention-backend with TransformerEngine, of which only the parts stand in here that note the flash-attn found."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend

from sleuth.megatron import model

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def install(monkeypatch: pytest.MonkeyPatch, *, flash_2: bool = False, flash_3: bool = False) -> None:
    parts = ATTENTION.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for name in (*names, f"{ATTENTION}.backends", f"{ATTENTION}.utils"):
        module: Any = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module.FlashAttentionUtils = SimpleNamespace(is_installed=flash_2, v3_is_installed=flash_3)
    monkeypatch.setattr(model, "transformer_engine_available", lambda: True)


@pytest.mark.parametrize("name", ["auto", "flash", "fused", "unfused"])
def test_without_transformer_engine_the_choice_means_nothing(name: str) -> None:
    assert model.attention_backend(name) is AttnBackend.auto


@pytest.mark.parametrize("name", ["auto", "fused", "unfused"])
def test_with_it_the_choice_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert model.attention_backend(name) is AttnBackend[name]


@pytest.mark.parametrize("found", [{"flash_2": True}, {"flash_3": True}])
def test_flash_where_it_is_installed(found: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **found)
    assert model.attention_backend("flash") is AttnBackend.flash


def test_flash_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron would switch all others off."""
    install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert model.attention_backend("flash") is AttnBackend.fused
    assert "taking fused (cuDNN)" in caplog.text
