"""Flags that mean something with TransformerEngine alone, of which only some parts stand in here."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("name", ["gradient_accumulation_fusion", "moe_grouped_gemm"])
def test_what_only_transformer_engine_does_is_off_without_it(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not model._with_engine(name, False)
    assert caplog.text == ""
    assert not model._with_engine(name, True)
    assert f"--{name.replace('_', '-')} is off: it needs TransformerEngine" in caplog.text
    install(monkeypatch)
    assert model._with_engine(name, True)
    assert not model._with_engine(name, False)


def test_it_is_told_to_megatron() -> None:
    shape = model.ModelShape(2, 64, 128, 4, 2, 16, 96, 1e-6, 1e4, False, True, True, 512, 4, 2, 48)
    given = {"gradient_accumulation_fusion": True, "moe_grouped_gemm": True}
    for flags in ({}, given):
        config = model.plain_config(shape, torch.float32, **flags)
        assert (config.gradient_accumulation_fusion, config.moe_grouped_gemm) == (
            (True, True) if flags else (False,) * 2
        )
