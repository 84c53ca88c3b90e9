"""A Hub on this machine that speaks the calls of an upload: create, read, validate, preupload, LFS batch, PUT, verify,
commit.

It keeps what it receives in memory, checks digests and sizes, and can be told to fail. Xet, the Hub's own transfer
protocol, is not spoken: clients are set to the LFS protocol.
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
    - `calls` lists (method, kind) of every call in order.
    - `fail_next[kind]` is a list of HTTP statuses to answer the next calls of a kind with; 0 drops the connection in
      the middle of the request body. Kinds: create, readme, validate, preupload, batch, put, verify, commit.
    """

    def __init__(self, lfs_threshold: int = 40_000):
        self.lfs_threshold = lfs_threshold
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.branches: dict[str, list[str]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail_next: dict[str, list[int]] = {}
        super().__init__(_make_handler(self))

    def count(self, kind: str) -> int:
        return sum(call == kind for _, call in self.calls)

    def upload_mode(self, repo: str, path: str, size: int) -> dict:
        content = self.files[repo].get(path)
        is_lfs = size > self.lfs_threshold
        oid = None
        if content is not None:
            # The Hub names regular files as git does and LFS files by their SHA-256.
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            oid = hashlib.sha256(content).hexdigest() if len(content) > self.lfs_threshold else git
        return {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}

    def batch(self, objects: list[dict]) -> list[dict]:
        answers = []
        for item in objects:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.objects:
                url = f"{self.url}/lfs/{item['oid']}"
                answer["actions"] = {"upload": {"href": url}, "verify": {"href": f"{self.url}/verify"}}
            answers.append(answer)
        return answers

    def commit(self, repo: str, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits[repo].append(value["summary"])
            elif line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.objects[value["oid"]]
            else:
                raise ValueError(f"unknown line {line['key']}")


def _make_handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            path = self.path.split("?")[0]
            if path == "/api/repos/create":
                return self.respond("create", self.create)
            if path == "/api/validate-yaml":
                return self.respond("validate", lambda body: {"errors": [], "warnings": []})
            if path == "/verify":
                return self.respond("verify", lambda body: {})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.respond("batch", lambda body: {"objects": hub.batch(json.loads(body)["objects"])})
            _, _, _, user, name, action, branch = path.split("/")
            repo = f"{user}/{name}"
            if repo not in hub.files:
                return self.answer(404, {"error": "Repository not found"})
            if action == "preupload":
                files = lambda body: [hub.upload_mode(repo, f["path"], f["size"]) for f in json.loads(body)["files"]]  # noqa: E731
                return self.respond("preupload", lambda body: {"files": files(body)})
            assert action == "commit", path
            return self.respond("commit", lambda body: self.commit(repo, branch, body))

        def do_PUT(self):
            oid = self.path.rsplit("/", 1)[1]

            def store(body):
                assert hashlib.sha256(body).hexdigest() == oid
                hub.objects[oid] = body
                return {}

            self.respond("put", store)

        def do_GET(self):
            if "/resolve/" in self.path:
                return self.respond("readme", self.resolve)
            hub.calls.append(("GET", self.path))
            self.answer(200, {"id": "user/name", "sha": "0" * 40, "siblings": []})

        def resolve(self, body):
            _, user, name, _, branch, path = self.path.split("/", 5)
            content = hub.files.get(f"{user}/{name}", {}).get(path)
            if content is None:
                return self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            self.answer_bytes(200, content, "text/plain")

        def create(self, body):
            request = json.loads(body)
            repo = f"{request.get('organization') or 'user'}/{request['name']}"
            if repo in hub.files:
                return self.answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"})
            hub.files[repo], hub.commits[repo], hub.branches[repo] = {}, [], []
            hub.private[repo] = request.get("visibility") == "private" or bool(request.get("private"))
            return {"url": f"{hub.url}/{repo}"}

        def commit(self, repo, branch, body):
            hub.branches[repo].append(branch)
            hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            number = len(hub.commits[repo])
            return {"commitUrl": f"{hub.url}/{repo}/commit/{number:040d}", "commitOid": f"{number:040d}"}

        def respond(self, kind, make_answer):
            hub.calls.append((self.command, kind))
            length = int(self.headers.get("Content-Length", 0))
            failures = hub.fail_next.get(kind, [])
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

    return Handler
