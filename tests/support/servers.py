"""An HTTP server on this machine, for as long as a `with` block lasts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Call(BaseHTTPRequestHandler):
    """A call to a server: its `path`, `headers`, and `body()`, to be answered by `reply`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.answer(self)

    do_POST = do_GET

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, status: int, content: dict | bytes, headers: dict[str, str] | None = None) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


class Loopback:
    """Listens on a free port of 127.0.0.1; `answer(call)` answers, in a thread per connection."""

    def __init__(self):
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Call)
        self._httpd.answer = self.answer
        self.port = self._httpd.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self._httpd.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self._httpd.shutdown()
        self._httpd.server_close()
