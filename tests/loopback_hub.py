"""A Hub on this machine that speaks the calls of an upload: create, read, validate, preupload, commit.

It keeps what it receives in memory and can be told to fail. Every file is a regular one, as on the Hub if it is small.
"""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler

from loopback import Loopback


class LoopbackHub(Loopback):
    """
    Start with `with LoopbackHub() as hub`; `hub.url` is its address.

    - `files[repo][path]` is the content after the commits so far, `commits[repo]` their messages, `branches[repo]`
      where to.
    - `calls` lists every call in order.
    - `fail_next[kind]` is a list of HTTP statuses to answer the next calls of a kind with; 0 drops the connection in
      the middle of the request body. Kinds: create, readme, validate, preupload, commit.
    """

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.branches: dict[str, list[str]] = {}
        self.private: dict[str, bool] = {}
        self.calls: list[str] = []
        self.fail_next: dict[str, list[int]] = {}
        super().__init__(type("Handler", (_Handler,), {"hub": self}))


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def do_POST(self):
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            return self.respond("create", self.create)
        if path == "/api/validate-yaml":
            return self.respond("validate", lambda body: {"errors": [], "warnings": []})
        _, _, _, user, name, action, branch = path.split("/")
        repo = f"{user}/{name}"
        if repo not in self.hub.files:
            return self.answer(404, {"error": "Repository not found"})
        answers = {"preupload": self.preupload, "commit": self.commit}
        self.respond(action, lambda body: answers[action](repo, branch, body))

    def do_GET(self):
        if "/resolve/" in self.path:
            return self.respond("readme", self.resolve)
        self.hub.calls.append(self.path)
        self.answer(200, {"id": "user/name", "sha": "0" * 40, "siblings": []})

    def resolve(self, body):
        _, user, name, _, branch, path = self.path.split("/", 5)
        content = self.hub.files.get(f"{user}/{name}", {}).get(path)
        if content is None:
            return self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        self.answer_bytes(200, content, "text/plain")

    def create(self, body):
        hub, request = self.hub, json.loads(body)
        repo = f"{request.get('organization') or 'user'}/{request['name']}"
        if repo in hub.files:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"})
        hub.files[repo], hub.commits[repo], hub.branches[repo] = {}, [], []
        hub.private[repo] = request.get("visibility") == "private" or bool(request.get("private"))
        return {"url": f"{hub.url}/{repo}"}

    def preupload(self, repo, branch, body):
        answers = []
        for path in [file["path"] for file in json.loads(body)["files"]]:
            content = self.hub.files[repo].get(path)  # the Hub names a file as git does
            oid = None if content is None else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            answers.append({"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def commit(self, repo, branch, body):
        header, *files = (json.loads(line)["value"] for line in body.splitlines())
        self.hub.branches[repo].append(branch)
        self.hub.commits[repo].append(header["summary"])
        self.hub.files[repo] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
        number = len(self.hub.commits[repo])
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{number:040d}", "commitOid": f"{number:040d}"}

    def respond(self, kind, make_answer):
        self.hub.calls.append(kind)
        length = int(self.headers.get("Content-Length", 0))
        failures = self.hub.fail_next.get(kind, [])
        status = failures.pop(0) if failures else None
        if status == 0:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length) if length else self.read_chunked()
        if status is not None:
            return self.answer(status, {"error": "told to fail"})
        answer = make_answer(body)
        if answer is not None:
            self.answer(200, answer)

    def read_chunked(self):
        parts = []
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
        return b"".join(parts)

    def answer(self, status, content, headers=None):
        self.answer_bytes(status, json.dumps(content).encode(), "application/json", headers)

    def answer_bytes(self, status, payload, kind, headers=None):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass
