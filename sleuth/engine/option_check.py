"""Asks SGLang's own parser about options of its server, without a server: names, kinds of values, choices.

The parser comes with the whole of SGLang, 5 to 20 s of imports, which no other process of a run's start needs: so a
process of its own asks it, and a set of options that was found good is remembered for that version of SGLang.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from sleuth.engine.option_names import option, option_flag
from sleuth.engine.server import EngineConfig, has_cuda, server_environment

TIMEOUT_SECONDS = 300.0
CLOSE = 0.6
"""How alike an option must be to be suggested, from 0 to 1."""


class NoSglangError(ValueError):
    """There are options, and no SGLang that could tell whether they are right."""


def check_options(options: Mapping[str, Sequence[str]]) -> None:
    """ValueError if SGLang's server does not take these options, name -> words; one line for each that is wrong.

    NoSglangError, if it is not installed.
    """
    if not options:
        return
    try:
        release = version("sglang")
    except PackageNotFoundError:
        named = ", ".join(map(option_flag, options))
        raise NoSglangError(f"{named}: expected SGLang, to check them, found none in {sys.prefix}") from None
    remembered = _cache() / hashlib.sha256(json.dumps([release, options], sort_keys=True).encode()).hexdigest()
    if remembered.exists():
        return
    problems = _ask(options)
    if problems:
        raise ValueError("\n".join(problem.replace("SGLang", f"SGLang {release}", 1) for problem in problems))
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.touch()
    except OSError:
        pass  # the next start asks again


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sleuth" / "sglang_options"


def _ask(options: Mapping[str, Sequence[str]]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "sleuth.engine.option_check", json.dumps(options)],
            env=server_environment(EngineConfig(""), Path(folder), has_cuda()),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    if done.returncode:
        raise ValueError(f"expected SGLang to check its options, found that it does not load:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def sglang_parser() -> argparse.ArgumentParser:
    """SGLang's parser of its server's command line; ValueError instead of an exit."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def find_problems(options: Mapping[str, Sequence[str]], parser: argparse.ArgumentParser) -> Iterator[str]:
    """What is wrong with each option, taken alone."""
    names = list(parser._option_string_actions)
    for name, words in options.items():
        given = option_flag(name)
        if option(name) not in names:
            nearest = difflib.get_close_matches(option(name), names, n=1, cutoff=CLOSE)
            hint = "see python -m sglang.launch_server --help"
            if nearest:
                hint = f"did you mean {option_flag(nearest[0].removeprefix('--'))}?"
            yield f"{given}: SGLang has no option {option(name)}; {hint}"
            continue
        try:
            parser.parse_args(["--model-path", "model", option(name), *words])
        except ValueError as error:
            yield f"{given}: SGLang says: {error}"


def main(argv: Sequence[str]) -> None:
    options: dict[str, Any] = json.loads(argv[0])
    sys.stdout.write("\n" + json.dumps(list(find_problems(options, sglang_parser()))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
