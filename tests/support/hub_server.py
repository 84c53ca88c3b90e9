"""A Hub on this machine that speaks the calls of an upload: create, read, validate, preupload, commit.

It keeps what it receives in memory and can be told to fail. Every file is a regular one, as on the Hub if it is small.
"""

import base64
import hashlib
import json

from support.servers import Call, Loopback


class LoopbackHub(Loopback):
    """
    Start with `with LoopbackHub() as hub`; `hub.url` is its address.

    - `files[repo][path]` is the content after the commits so far, `commits[repo]` their messages, `branches[repo]`
      where to, `created[repo]` the branches that were created besides `main`. A commit to another one fails.
    - `calls` lists every call in order.
    - `fail_next[kind]` is a list of HTTP statuses to answer the next calls of a kind with; 0 drops the connection in
      the middle of the request body. Kinds: create, branch, readme, validate, preupload, commit.
    """

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.branches: dict[str, list[str]] = {}
        self.created: dict[str, list[str]] = {}
        self.private: dict[str, bool] = {}
        self.calls: list[str] = []
        self.fail_next: dict[str, list[int]] = {}
        super().__init__()

    def answer(self, call: Call) -> None:
        path = call.path.split("?")[0]
        if path == "/api/repos/create":
            kind, answer = "create", self._create
        elif path == "/api/validate-yaml":
            kind, answer = "validate", lambda body: (200, {"errors": [], "warnings": []})
        elif "/resolve/" in path:
            kind, answer = "readme", lambda body: self._resolve(*path[1:].split("/", 4))
        elif call.command == "GET":
            kind, answer = path, lambda body: (200, {"id": "user/name", "sha": "0" * 40, "siblings": []})
        else:
            _, _, _, user, name, kind, branch = path.split("/")
            answer = {"branch": self._branch, "preupload": self._preupload, "commit": self._commit}[kind]
            answer = self._of_repository(answer, f"{user}/{name}", branch)
        self.calls.append(kind)
        failures = self.fail_next.get(kind, [])
        status = failures.pop(0) if failures else None
        if status == 0:
            call.rfile.read(int(call.headers.get("Content-Length", 0)) // 2)
            call.close_connection = True
            call.connection.close()
            return
        body = call.body()
        call.reply(*(answer(body) if status is None else (status, {"error": "told to fail"})))

    def _of_repository(self, answer, repo, branch):
        if repo in self.files and (answer == self._branch or branch in ("main", *self.created[repo])):
            return lambda body: (200, answer(repo, branch, body))
        return lambda body: (404, {"error": "Repository not found"})

    def _resolve(self, user, name, _, branch, path):
        content = self.files.get(f"{user}/{name}", {}).get(path)
        if content is None:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        return 200, content

    def _create(self, body):
        request = json.loads(body)
        repo = f"{request.get('organization') or 'user'}/{request['name']}"
        if repo in self.files:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
        self.files[repo], self.commits[repo], self.branches[repo], self.created[repo] = {}, [], [], []
        self.private[repo] = request.get("visibility") == "private" or bool(request.get("private"))
        return 200, {"url": f"{self.url}/{repo}"}

    def _branch(self, repo, branch, body):
        self.created[repo].append(branch)
        return {}

    def _preupload(self, repo, branch, body):
        answers = []
        for path in [file["path"] for file in json.loads(body)["files"]]:
            content = self.files[repo].get(path)  # the Hub names a file as git does
            oid = None if content is None else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            answers.append({"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def _commit(self, repo, branch, body):
        header, *files = (json.loads(line)["value"] for line in body.splitlines())
        self.branches[repo].append(branch)
        self.commits[repo].append(header["summary"])
        self.files[repo] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
        number = len(self.commits[repo])
        return {"commitUrl": f"{self.url}/{repo}/commit/{number:040d}", "commitOid": f"{number:040d}"}
