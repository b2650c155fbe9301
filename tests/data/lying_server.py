"""Mirrors on this machine: honest ones, and ones that fail or lie in every way that a download
must survive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["_Handler", bytes], None]


class Mirror:
    """Serves files from memory. The first request gets the first answer, and so on; the last answer
    repeats.

    `asked` has the path and the Range header of each request.
    """

    def __init__(self, files: Mapping[str, bytes], *answers: Answer) -> None:
        self.files = files
        self.answers = list(answers)
        self.asked: list[tuple[str, str | None]] = []
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = False  # so that closing waits for them
        self._server.mirror = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    @property
    def ranges(self) -> list[str | None]:
        return [asked for _, asked in self.asked]

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def mirror(self) -> Mirror:
        return self.server.mirror  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self.close_connection = True
        self.mirror.asked.append((self.path, self.headers.get("Range")))
        answers = self.mirror.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        content = self.mirror.files.get(self.path.lstrip("/"))
        with suppress(ConnectionError):  # whoever asked may have enough
            (answer if content is not None else status(404))(self, content or b"")

    def begin(self, code: int, **headers: Any) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def begin_at(self, content: bytes, code: int = 206) -> int:
        """The honest beginning of an answer; where the content is to begin."""
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start and start >= len(content):
            self.begin(416, Content_Range=f"bytes */{len(content)}", Content_Length=0)
        elif start:
            range_ = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.begin(code, Content_Range=range_, Content_Length=len(content) - start)
        else:
            self.begin(200, Content_Length=len(content))
        return start

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


def honest(handler: _Handler, content: bytes) -> None:
    handler.wfile.write(content[handler.begin_at(content) :])


def without_ranges(handler: _Handler, content: bytes) -> None:
    handler.begin(200, Content_Length=len(content))
    handler.wfile.write(content)


def without_length(handler: _Handler, content: bytes) -> None:
    handler.begin(200)
    handler.wfile.write(content)


def chunked_and_cut(at: int) -> Answer:
    """Announces one chunk of everything, and ends within it."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.begin(200, Transfer_Encoding="chunked")
        handler.wfile.write(f"{len(content):x}\r\n".encode() + content[:at])

    return answer


def truncates(at: int) -> Answer:
    """Announces everything, and ends at a byte of the file."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.wfile.write(content[handler.begin_at(content) : at])

    return answer


def stalls(at: int) -> Answer:
    """Announces everything, and says nothing more from a byte of the file on."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.wfile.write(content[handler.begin_at(content) : at])
        handler.mirror.closing.wait()

    return answer


def lies(instead: bytes) -> Answer:
    """Has other content under the name."""
    return lambda handler, _: honest(handler, instead)


def wrong_range(handler: _Handler, content: bytes) -> None:
    """Answers a request for the rest with the beginning."""
    handler.begin(
        206, Content_Range=f"bytes 0-{len(content) - 1}/{len(content)}", Content_Length=len(content)
    )
    handler.wfile.write(content)


def endless(handler: _Handler, content: bytes) -> None:
    """Never stops sending."""
    handler.begin(200)
    while not handler.mirror.closing.is_set():
        handler.wfile.write(bytes(1 << 16))


def status(code: int) -> Answer:
    return lambda handler, _: handler.begin(code, Content_Length=0)


def redirects(target: str) -> Answer:
    return lambda handler, _: handler.begin(302, Location=target, Content_Length=0)
