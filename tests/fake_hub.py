"""A Hugging Face hub on a loopback port that answers every request for a model's file in one way."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class FakeHub:
    """Answers with a status and the hub's own header for the kind of error; `asked` has what came.

    Attributes:
        url: for HF_ENDPOINT.
        asked: pairs of a path and the Authorization header, "" where there was none.
    """

    def __init__(self, status: int, code: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked.append((self.path, self.headers.get("Authorization", "")))
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                if status == 200:
                    self.send_header("ETag", '"0123"')
                    self.send_header("X-Repo-Commit", "0" * 40)
                self.end_headers()

            do_GET = do_HEAD  # noqa: N815 - the same

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
