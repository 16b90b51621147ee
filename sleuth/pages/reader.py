"""A process that reads pages of strangers: `python -m sleuth.pages.reader SECONDS`, started by `sleuth.pages.pool`.

It loads the parsers once and reads each page in a fork of itself, which the kernel kills after SECONDS, in the midst of
a parser's C code, too. It ends when its standard input does, so it never outlives who started it by more than that.

A request is a line of JSON (`charset`, `cut`, `size`, and `snippet` or `question`) and `size` bytes; the answer is a
line of JSON (`context`, a text or null). The first line says that it is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from sleuth.pages.text import decode_page, main_text, relevant_text, snippet_context

MEMORY = 2 * 1024**3
"""Bytes of address space that one page may take."""


def serve(requests: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    """Answer one request after the other."""
    while line := requests.readline():
        header = json.loads(line)
        data = requests.read(header["size"])
        if len(data) < header["size"]:
            return
        answers.write(_in_a_fork(data, header, seconds) or b'{"context": null}')
        answers.write(b"\n")
        answers.flush()


def _in_a_fork(data: bytes, header: dict[str, Any], seconds: float) -> bytes:
    """The fork's answer; empty if it was killed or failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # the signal's default action ends the process
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            html = decode_page(data, header["charset"], cut=header["cut"])
            if (question := header.get("question")) is not None:
                context = relevant_text(html, question)
            else:
                context = snippet_context(html, header["snippet"])
            with os.fdopen(writing, "wb") as answer:
                answer.write(json.dumps({"context": context}).encode())
        except BaseException:  # whatever a page does to the parsers
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text if status == 0 else b""


def main() -> None:
    main_text("<p>loads the parsers</p>")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for who started it
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))


if __name__ == "__main__":
    main()
