"""A small model hub on this machine, over local folders: what huggingface_hub asks of the real one, and no more."""

import hashlib
import http.server
import shutil
import threading
from pathlib import Path

__all__ = ["StandInHub"]


class StandInHub:
    """Serves folders as `owner/name` repositories from a thread, and notes every request as (method, repo, file).

    It lists the branches of a repository. What else huggingface_hub asks for itself is answered as unknown.

    `cache` is the folder in which huggingface_hub keeps what it fetches. `refused` gives repositories the status that
    is answered in place of their files: 401 or 403 with the error code of gated models. `cut` says by file how many
    more answers end in mid-file.
    """

    def __init__(self, cache):
        self.cache = Path(cache)
        self.requests, self.refused, self.cut = [], {}, {}
        self._commits, self._folders = {}, {}
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        """Stop answering: from now on nothing listens."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def publish(self, name, folder, branch="main"):
        """Let a branch of a repository stand at a folder's files; its commit."""
        commit = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self._commits[name, branch] = self._commits[name, commit] = commit
        self._folders[commit] = Path(folder)
        return commit

    @property
    def fetched(self):
        """Files whose content was sent, in order."""
        return [file for method, _, file in self.requests if method == "GET"]

    @property
    def asked(self):
        """Files that were asked for in any way."""
        return {file for _, _, file in self.requests}

    def put_in_cache(self, name, *files, branch="main"):
        """Fill the cache of huggingface_hub as a fetch of these files does."""
        commit = self._commits[name, branch]
        repository = self.cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(self._folders[commit] / file, repository / "snapshots" / commit)

    def _answer(self, path):
        """Repository, file, status, headers and content."""
        name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        known = any(repository == name for repository, _ in self._commits)
        if name in self.refused:
            return name, file, self.refused[name], {"X-Error-Code": "GatedRepo"}, b""
        if not known:
            return name, file, 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self._commits.get((name, revision))
        if commit is None:
            return name, file, 404, {"X-Error-Code": "RevisionNotFound"}, b""
        place = self._folders[commit] / file
        if not place.is_file():
            return name, file, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        content = place.read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return name, file, 200, headers, content

    def _handler(hub):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self._reply("HEAD")

            def do_GET(self):
                self._reply("GET")

            def _reply(self, method):
                name, file, status, headers, content = hub._answer(self.path)
                if "/resolve/" in self.path:
                    hub.requests.append((method, name, file))
                start = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
                if start and status == 200 and method == "GET":
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                    status, content = 206, content[int(start) :]
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if method == "HEAD":
                    return
                if hub.cut.get(file, 0):
                    hub.cut[file] -= 1
                    content = content[: len(content) // 2] if start == "" else b""
                self.wfile.write(content)

            def log_message(self, format, *arguments):
                pass

        return Handler
