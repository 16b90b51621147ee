from pathlib import Path

import numpy as np
import pytest

from tools.plot_mismatch import log_ratios, main


def write_dump(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        np.savez(
            folder / f"rank000_{number:06d}.npz",
            train=np.array([-1.0, -2.0, -3.0], np.float32),
            rollout=np.array([-1.5, -2.0, -2.0], np.float32),
            sample=np.array([0, 0, 2]),
        )
    return folder


def test_log_ratios_of_tokens_and_samples(tmp_path):
    tokens, samples = log_ratios(write_dump(tmp_path / "dump"))
    assert tokens.tolist() == [0.5, 0.0, -1.0] * 2
    assert samples.tolist() == [0.5, -1.0] * 2
    with pytest.raises(ValueError, match="set mis_dump_dir"):
        log_ratios(tmp_path)


def test_both_figures_are_written(tmp_path):
    dump = write_dump(tmp_path / "dump")
    assert main(["weights", "--dump", f"a=b={dump}", "--output", str(tmp_path / "new" / "weights.png")]) == 0
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": s, "eval/demo/t1.0/em": 0.1, "train/train_rollout_logprob_abs_diff": 0.1 * s} for s in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(map(str, lines)).replace("'", '"') + "\n")
    assert main(["runs", "--run", f"one={run}", "--run", f"one={run}", "--output", str(tmp_path / "runs.png")]) == 0
    assert (tmp_path / "new" / "weights.png").stat().st_size > 10_000
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def test_a_name_is_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["runs", "--run", str(tmp_path), "--output", "x.png"])
    assert "expected NAME=FOLDER" in capsys.readouterr().err


def test_what_is_not_there_is_told(tmp_path, capsys):
    for arguments, message in (
        (["runs", "--run", f"a={tmp_path}"], "metrics.jsonl"),
        (["weights", "--dump", f"a={tmp_path}"], "set mis_dump_dir"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--output", str(tmp_path / "x.png")])
        assert message in capsys.readouterr().err
