"""A stand-in for W&B on 127.0.0.1: it answers as much as a run, a saved view and a report need, and fails on demand.

What it is asked is kept, so that a test sees what a client would have sent to the real one.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef" * 2 + "01234567"  # of the right length, and nobody's


class Server(ThreadingHTTPServer):
    """Modes: `ok`; `401` refuses every key; `closed` hangs up on each question; `silent` never answers."""

    daemon_threads = True

    def __init__(self, mode: str = "ok", projects: tuple[str, ...] = ("mtp",)) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.mode = mode
        self.fails_after: int | None = None
        """How many lines of history are taken before the mode becomes `then`."""
        self.then = "closed"
        self.projects = projects
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Path or name of the GraphQL operation, and the body or its variables."""
        self.views: dict[str, dict[str, Any]] = {}
        self.history: list[dict[str, Any]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the game."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def question(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.mode == "silent":
            self.server.over.wait(60)
        if self.server.mode in ("silent", "closed"):
            self.close_connection = True
            self.connection.close()
        elif self.server.mode == "401":
            self.server.asked.append((self.path, {}))
            self.reply({"errors": [{"message": "user is not logged in", "path": None}], "data": None}, 401)
        elif self.path == "/graphql":
            self.graphql(json.loads(body))
        elif self.path.endswith("/file_stream"):
            self.file_stream(json.loads(body))
        else:
            self.server.asked.append((self.path, {}))
            self.reply({})

    do_GET = do_POST = do_PUT = question

    def file_stream(self, body: dict[str, Any]) -> None:
        self.server.asked.append(("file_stream", body))
        lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.server.history += [json.loads(line) for line in lines]
        self.reply({})
        limit = self.server.fails_after
        if limit is not None and len(self.server.history) >= limit:
            self.server.mode = self.server.then

    def graphql(self, body: dict[str, Any]) -> None:
        query, variables = body["query"], body.get("variables") or {}
        name = query.split("{")[0].split("(")[0].split()[-1] if query.split("{")[0].strip() else "?"
        self.server.asked.append((name, variables))
        find = getattr(self, f"answer_{name}", None)
        self.reply({"data": find(variables) if find else {}})

    def answer_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        project = {"id": "UDp", "name": variables["project"], "entity": {"id": "RTp", "name": "tester"}}
        bucket = {"id": f"R-{name}", "name": name, "displayName": variables["displayName"] or name, "config": "{}"}
        bucket |= {"description": None, "sweepName": None, "project": project, "historyLineCount": 0}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def answer_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.server.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}

    def answer_ServerFeaturesQuery(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def answer_Viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        teams = {"edges": [{"node": {"name": "tester"}}]}
        return {"viewer": {"id": "V", "entity": "tester", "username": "tester", "flags": "{}", "teams": teams}}

    answer_GetDefaultEntity = answer_Viewer

    def answer_View(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["name"] not in self.server.projects:
            return {"project": None}
        found = [view for view in self.server.views.values() if view["name"] == variables["viewName"]]
        return {"project": {"allViews": {"edges": [{"node": view} for view in found]}}}

    def answer_ProjectViews(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["project"] not in self.server.projects:
            return {"project": None}
        found = [view for view in self.server.views.values() if view["type"] == "runs"]
        page = {"endCursor": None, "hasNextPage": False}
        edges = [{"node": view, "cursor": "c"} for view in found]
        return {"project": {"allViews": {"edges": edges, "pageInfo": page}}}

    def answer_CreateArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        """As if it were there already: then nobody asks how to send it, and tables come as files of the run, too."""
        artifact = {"id": "A", "state": "COMMITTED", "artifactSequence": {"id": "S", "latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def answer_ProjectInternalId(self, variables: dict[str, Any]) -> dict[str, Any]:
        known = variables["projectName"] in self.server.projects
        return {"project": {"id": "P", "internalId": "1"} if known else None}

    def answer_GetProjects(self, variables: dict[str, Any]) -> dict[str, Any]:
        node = {"__typename": "Project", "id": "P", "entityName": "tester", "isBenchmark": False, "user": None}
        node["createdAt"] = "2026-12-01T00:00:00Z"
        edges = [{"node": {**node, "name": name}} for name in self.server.projects]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"models": {"edges": edges, "pageInfo": page}}

    def answer_upsertView(self, variables: dict[str, Any]) -> dict[str, Any]:
        """As W&B does it, the id tells which view is meant; without one there is a new one."""
        number = variables.get("id") or f"view{len(self.server.views)}"
        project = {"id": "P", "name": variables["projectName"], "entityName": variables["entityName"]}
        view = {**variables, "id": number, "project": project, "createdAt": "2026-12-01T00:00:00Z"}
        view |= {"updatedAt": "2026-12-01T00:00:00Z", "user": {"name": "tester", "username": "tester"}}
        inserted = number not in self.server.views
        self.server.views[number] = view
        return {"upsertView": {"view": view, "inserted": inserted}}

    answer_UpsertView2 = answer_upsertView


@contextmanager
def serving(mode: str = "ok", **settings: Any) -> Iterator[Server]:
    """A server for the time of a test."""
    server = Server(mode)
    for name, value in settings.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
