"""The viewer over HTTP: answers, refusals, the headers that protect the page, and the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sleuth.loopback import direct_session
from sleuth.viewer.__main__ import listen, main, run_folders
from tests.viewer.made_runs import SCRIPT, made_sample, write_run, write_samples

STEP = "step_0000001.jsonl"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("viewed")
    folders = [write_run(place / "runs" / name, steps=steps, seed=steps) for name, steps in (("a", 3), ("b", 5))]
    write_samples(folders[0], STEP, [made_sample(0, "Ann", right=True), made_sample(1, SCRIPT, right=False)])
    return folders


@pytest.fixture(scope="module")
def url(runs: list[Path]) -> Iterator[str]:
    with Viewer(runs[0].parent) as (address, _):
        yield address


class Viewer:
    """The viewer as its user starts it; ends it."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "sleuth.viewer", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> tuple[str, subprocess.Popen[str]]:
        assert self.process.stdout is not None
        timer = threading.Timer(60, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        return found[0], self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


def ask(url: str, path: str, **parameters: Any) -> requests.Response:
    return direct_session().get(f"{url}/{path}", params=parameters, timeout=30)


def test_runs_curves_and_trajectories(url: str) -> None:
    found = ask(url, "api/runs").json()
    assert [(run["name"], run["step"], run["of"], run["live"]) for run in found["runs"]] == [
        ("a", 3, 10, True),
        ("b", 5, 10, True),
    ]
    assert found["differing"] == {"seed": [3, 5]}
    assert "mean reward" in found["metrics"]["reward/mean"]
    series = ask(url, "api/series", name=["reward/mean", "nothing"]).json()
    assert series["nothing"] == {}
    assert series["reward/mean"]["a"] == [[1, 0.13], [2, 0.23], [3, pytest.approx(0.33)]]
    page = ask(url, "api/trajectories", run="a", file=STEP, filter="wrong").json()
    assert (page["total"], page["of"], page["rows"][0]["number"]) == (1, 2, 1)
    assert ask(url, "api/trajectory", run="a", file=STEP, number=1).json()["record"]["notes"]["answer"] == SCRIPT


@pytest.mark.parametrize(
    ("path", "parameters", "status", "words"),
    [
        ("api/trajectories", {"run": "c"}, 404, "expected one of a, b as run"),
        ("api/trajectories", {"run": "a", "file": "../config.yaml"}, 404, "expected a file of trajectories"),
        ("api/trajectories", {"run": "a", "file": STEP, "filter": "x"}, 400, "expected one of all"),
        ("api/trajectories", {"run": "a", "file": STEP, "offset": "x"}, 400, "invalid literal"),
        ("api/trajectory", {"run": "a", "file": STEP, "number": "9"}, 404, "below 2"),
        ("static/server.py", {}, 404, "no such file"),
        ("static/..%2f__init__.py", {}, 404, ""),
        ("nothing", {}, 404, ""),
    ],
)
def test_what_is_not_there_is_said(url: str, path: str, parameters: dict[str, str], status: int, words: str) -> None:
    answer = ask(url, path, **parameters)
    assert answer.status_code == status
    assert words in answer.text
    assert not answer.headers["Content-Type"].startswith("text/html")


def test_every_answer_forbids_scripts_and_requests_but_the_pages_own(url: str) -> None:
    for path in ("", "static/app.js", "api/runs", "nothing"):
        policy = ask(url, path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert ask(url, path).headers["X-Content-Type-Options"] == "nosniff"


def test_a_name_of_somebody_elses_is_refused(url: str) -> None:
    headers = {"Host": "evil.example:80"}
    answer = direct_session().get(f"{url}/api/runs", headers=headers, timeout=30)
    assert answer.status_code == 403
    assert "127.0.0.1" in answer.text


def test_static_files_never_make_html_of_text_and_ask_nobody_else() -> None:
    static = Path(__file__).resolve().parents[2] / "sleuth" / "viewer" / "static"
    texts = {path.name: path.read_text(encoding="utf-8") for path in static.iterdir()}
    assert {"index.html", "app.js", "style.css"} <= texts.keys()
    for name, text in texts.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text, f"{word} in {name}"
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_folders_of_runs_are_found_and_others_named(runs: list[Path], tmp_path: Path) -> None:
    assert run_folders(runs[0].parent.parent) == runs
    assert run_folders(runs[0]) == [runs[0]]
    young = tmp_path / "young"  # a run that has not logged a step
    (young / "logs").mkdir(parents=True)
    (young / "config.yaml").write_text("{}")
    assert run_folders(young) == [young]
    with pytest.raises(ValueError, match="expected the folder of a run"):
        run_folders(tmp_path / "nowhere")


def test_a_port_that_is_taken_is_named(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit):
            main([str(runs[0]), "--port", str(port)])
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
