"""As much of the Hugging Face Hub as from_pretrained needs, on this machine: folders OWNER/MODEL, one revision."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40
GATED = "me/gated"


class Hub(BaseHTTPRequestHandler):
    root: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        else:  # OWNER/MODEL/resolve/REVISION/FILE
            self._file("/".join(parts[:2]), parts[3:])

    def _api(self, repo: str, rest: list[str]) -> None:
        if self._known(repo, rest[1] if rest[:1] == ["revision"] else "main"):
            if rest and rest[0] != "revision":
                return self._refuse(404, "EntryNotFound")
            files = [{"rfilename": path.name} for path in (self.root / repo).iterdir()]
            self._send(json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode(), {})

    def _file(self, repo: str, rest: list[str]) -> None:
        if self._known(repo, rest[0]):
            path = self.root / repo / "/".join(rest[1:])
            if not path.is_file():
                return self._refuse(404, "EntryNotFound")
            body = path.read_bytes()
            self._send(body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

    def _known(self, repo: str, revision: str) -> bool:
        if repo == GATED:
            self._refuse(403, "GatedRepo")
        elif not (self.root / repo).is_dir():
            self._refuse(401, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve the folders under `root`; yields the address, for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHere", (Hub,), {"root": root}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
