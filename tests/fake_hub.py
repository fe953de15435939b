"""A Hub on 127.0.0.1, with as much of the real one's HTTP as its client needs to make, fill and read repositories.

Everything is kept in memory, and all files are "regular" ones, whose content comes with the commit. It can be told to
answer with an error, and to break off downloads in the middle.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api
from transformers.utils import hub as transformers_hub

WRITES, READS = "hf_WritesEverything0123456789", "hf_ReadsOnly0123456789abcdefgh"
Files = dict[str, bytes]


@dataclass
class Repo:
    """Commits by hash, and where branches stand."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        files = self.commits.get(self.refs.get(branch, ""), {}) | files
        told = f"{len(self.commits)}" + "".join(
            f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in files.items()
        )
        sha = hashlib.sha1(told.encode()).hexdigest()
        self.commits[sha], self.refs[branch] = files, sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class FakeHub:
    """The Hub's state. `asked` are all requests so far, as (method, path, token)."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    trouble: Callable[[str, str], int | None] = lambda method, path: None
    """The status with which to answer a method and path in place of an answer."""
    cuts: int = 0
    """How many downloads are to break off in the middle."""

    def add(self, repo_id: str, folder: Path, branch: str = "main") -> str:
        """A commit of the files in a folder, as somebody else might have made it."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return self.repos.setdefault(repo_id, Repo()).commit(files, branch)


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", body: Any = None) -> None:
        self.status, self.body = status, {"error": message} if body is None else body
        self.headers = {key: value for key, value in (("X-Error-Code", code), ("X-Error-Message", message)) if value}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.asked.append((self.command, path, token))
        try:
            if status := self.hub.trouble(self.command, path):
                raise _Refused(status, message="as the test wants")
            if token not in ("", READS, WRITES):
                raise _Refused(401, message="Invalid credentials in Authorization header")
            if (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
                return self._file(*found.groups(), token)
            self._json(200, self._api(path, body, token))
        except _Refused as refused:
            self._json(refused.status, refused.body, refused.headers)

    do_GET = do_HEAD = do_POST = _answer

    def _api(self, path: str, body: bytes, token: str) -> Any:
        if path == "/api/validate-yaml":
            if "license: no-such" in json.loads(body)["content"]:
                raise _Refused(400, body={"errors": [{"message": '"license" must be one of [apache-2.0, …]'}]})
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions(/1)?", path)) is not None:
            return self._pull_request(found[1], token)
        what = r"(?:/(revision|tree|branch|preupload|commit)/(refs/pr/\d+|[^/]+))?"
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)" + what, path)
        if found is None:  # a folder of a tree, too: there are none
            raise _Refused(404, "EntryNotFound", "Entry not found")
        repo_id, what, revision = found.groups()
        repo = self._repo(repo_id, token)
        if what in ("branch", "preupload", "commit") and token != WRITES:
            raise _Refused(403, message="this token cannot write")
        if what == "branch":
            if revision in repo.refs:
                raise _Refused(409)
            repo.refs[revision] = repo.refs.get("main") or repo.commit({})
            return {}
        if what == "preupload":
            kinds = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": one["path"], **kinds} for one in json.loads(body)["files"]]}
        if what == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines[1:]}
            sha = repo.commit(files, "refs/pr/1" if "create_pr=1" in self.path else revision)
            url = f"{self.hub.url}/{repo_id}"
            return {"commitUrl": f"{url}/commit/{sha}", "commitOid": sha, "pullRequestUrl": f"{url}/discussions/1"}
        sha = self._sha(repo, revision or "main")
        files = repo.commits[sha]
        if what == "tree":
            return [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        siblings = [{"rfilename": name} for name in files]
        return {"_id": repo_id, "id": repo_id, "sha": sha, "private": repo.private, "tags": [], "siblings": siblings}

    def _pull_request(self, repo_id: str, token: str) -> Any:
        """The first and only one, of which the client sends the commits to `refs/pr/1`."""
        repo = self._repo(repo_id, token)
        repo.refs.setdefault("refs/pr/1", repo.refs["main"])
        changes, times = {"base": "refs/heads/main"}, "2026-01-01T00:00:00.000Z"
        told = {"num": 1, "title": "one", "status": "draft", "isPullRequest": True, "createdAt": times, "events": []}
        return told | {"repo": {"name": repo_id, "type": "model"}, "changes": changes, "filesWithConflicts": []}

    def _create(self, asked: dict[str, Any], token: str) -> Any:
        if token == "":
            raise _Refused(401, message="Invalid username or password.")
        if token != WRITES:
            raise _Refused(403, message="this token cannot write")
        repo_id = f"{asked['organization'] or 'you'}/{asked['name']}"
        if repo_id in self.hub.repos:
            raise _Refused(409, body={"url": f"{self.hub.url}/{repo_id}"})
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.repos[repo_id] = Repo(private=private)
        self.hub.repos[repo_id].commit({})
        return {"url": f"{self.hub.url}/{repo_id}"}

    def _repo(self, repo_id: str, token: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and token == ""):
            raise _Refused(401 if token == "" else 404, "RepoNotFound", "Repository not found")
        return repo

    def _sha(self, repo: Repo, revision: str) -> str:
        sha = repo.find(revision)
        if sha is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def _file(self, repo_id: str, revision: str, name: str, token: str) -> None:
        repo = self._repo(repo_id, token)
        sha = self._sha(repo, revision)
        if name not in repo.commits[sha]:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        data = repo.commits[sha][name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = data[start:]
        if self.hub.cuts and name.endswith(".safetensors"):
            self.hub.cuts -= 1
            rest = rest[: len(rest) // 2]
            self.close_connection = True
        self.wfile.write(rest)

    def _json(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving() -> Iterator[FakeHub]:
    """The Hub, until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def as_the_hub(hub: FakeHub, cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """The client asks this Hub, as it would with HF_ENDPOINT set, with a token that may write, and an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", WRITES)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(hf_api.api, "endpoint", hub.url)
        patch.setattr(transformers_hub, "_hf_api", None, raising=False)  # newer releases keep one, with its endpoint
        huggingface_hub.close_session()
        yield patch
    huggingface_hub.close_session()
