"""W&B's own client against a server that answers what it asks for: what arrives is one run, whole and in order."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tuple(int(part) for part in metadata.version("wandb").split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VERSION < (0, 31), reason="what the client asks for differs from version to version"),
]
PROJECT = {"id": "p", "name": "fusedops", "entity": {"id": "e", "name": "me"}}


class Server(http.server.ThreadingHTTPServer):
    """Keeps one run: the rows of its history at their offsets, its configuration and summary."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: dict[int, dict] = {}
        self.config: dict = {}
        self.summary: dict = {}
        self.ids: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        return kept | {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": "0123456789" * 4}

    def answer(self, query: str, variables: dict) -> dict:
        if "RunResumeStatus" in query:
            return {"model": PROJECT | {"bucket": self.bucket() if self.ids else None}}
        if "upsertBucket" in query:
            new = not self.ids
            self.ids.add(variables["name"])
            self.config |= json.loads(variables["config"] or "{}")
            return {"upsertBucket": {"bucket": self.bucket() | {"project": PROJECT}, "inserted": new}}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"http://127.0.0.1:{self.server_port}/"} for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            user = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": user, "serverInfo": {"features": []}}
        return {}

    def bucket(self) -> dict:
        tail = json.dumps(self.history[max(self.history)]) if self.history else None
        return {
            "id": "x",
            "name": next(iter(self.ids)),
            "displayName": "native",
            "summaryMetrics": json.dumps(self.summary),
            "config": json.dumps(self.config),
            "wandbConfig": '{"t": 1}',
            "tags": [],
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(self.history),
            "historyTail": json.dumps([tail] if tail else []),
            "eventsTail": "[]",
        }

    def receive(self, files: dict) -> None:
        for name, part in files.items():
            if name == "wandb-history.jsonl":
                self.history |= {part["offset"] + i: json.loads(row) for i, row in enumerate(part["content"])}
            elif name == "wandb-summary.json":
                self.summary |= json.loads(part["content"][-1])


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict = {}
        if self.path == "/graphql":
            request = json.loads(body)
            answer = {"data": self.server.answer(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.server.receive(json.loads(body).get("files") or {})
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


RECORD = """
import sys
from pathlib import Path
from engine.config import TrackerConfig
from engine.tracking import make_tracker
directory, mode, first, last = sys.argv[1:]
tracker = make_tracker(TrackerConfig(mode=mode), Path(directory), {"train": {"steps": 6}})
tracker.start("native")
for step in range(int(first), int(last) + 1):
    tracker.log("native", step, {"train/loss": 1 / step})
tracker.summarize("native", {"metrics": {"loss": 0.125}})
tracker.close(0)
"""


def record(server: Server, directory: Path, mode: str, first: int, last: int) -> None:
    """A stretch of a run, in a process of its own."""
    command = [sys.executable, "-c", RECORD, str(directory), mode, str(first), str(last)]
    result = subprocess.run(
        command, cwd=ROOT, env=server.environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "tracking ends" not in result.stderr, result.stderr
    time.sleep(1)  # W&B names its directories by the second


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_run_and_its_continuation_arrive_as_one(server, tmp_path, mode):
    record(server, tmp_path, mode, 1, 3)
    record(server, tmp_path, mode, 4, 6)
    if mode == "offline":
        assert server.ids == set()
        paths = sorted(map(str, tmp_path.glob("wandb/offline-run-*")))
        command = [sys.executable, "-m", "wandb", "sync", *paths]
        subprocess.run(command, cwd=tmp_path, env=server.environment, capture_output=True, timeout=120, check=True)
    assert server.ids == {json.loads((tmp_path / "tracker.json").read_text())["runs"]["native"]}
    rows = [server.history[offset] for offset in sorted(server.history)]
    assert sorted(server.history) == [0, 1, 2, 3, 4, 5]
    assert [row["_step"] for row in rows] == [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/loss"] for row in rows] == pytest.approx([1 / step for step in range(1, 7)])
    assert server.config["train"]["value"] == {"steps": 6} and server.config["arm"]["value"] == "native"
    assert server.summary["metrics"] == {"loss": 0.125} and server.summary["train/loss"] == pytest.approx(1 / 6)
