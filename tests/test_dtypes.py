"""Precisions: what auto means, and the warning where bfloat16 is slow."""

from pathlib import Path

import pytest

from sleuth.dtypes import dtype_name, slow_on_cpu


def test_auto_is_bfloat16_on_gpus_only() -> None:
    assert [dtype_name("auto", on_gpu=gpu) for gpu in (True, False)] == ["bfloat16", "float32"]
    assert dtype_name("bfloat16", on_gpu=False) == "bfloat16"


@pytest.mark.parametrize(
    ("name", "flags", "warns"),
    [
        ("bfloat16", "fpu avx2 avx512f", True),
        ("bfloat16", "fpu avx512_bf16 avx2", False),
        ("bfloat16", "amx_bf16", False),
        ("float32", "fpu avx2", False),
        ("auto", "fpu avx2", False),
    ],
)
def test_bfloat16_is_told_where_the_cpu_lacks_it(tmp_path: Path, name: str, flags: str, warns: bool) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert bool(slow_on_cpu(name, cpuinfo)) == warns


def test_an_unknown_cpu_is_not_judged(tmp_path: Path) -> None:
    assert slow_on_cpu("bfloat16", tmp_path / "missing") is None
