"""A JupyterLab server of the tests' own, and a page in it that runs cells and reads outputs.

Nothing of the user's Jupyter is read or written: every folder of it lies in a temporary one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Locator, Page

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# No news, no update check, no autosave; all cells in the page, so that a test finds those out of sight.
_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}

# The toolbar shows "idle" before there is a kernel; only the session tells.
_READY = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  const kernel = panel?.sessionContext?.session?.kernel;
  return Boolean(panel?.context?.isReady && kernel?.status === "idle" && kernel.connectionStatus === "connected");
}"""

# The changes of widgets that the kernel has not answered yet; it may take them on a thread of their own (a subshell).
_WATCH = """() => {
  const changes = window.changesUnderWay = new Set();
  window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.anyMessage.connect((_, { msg, direction }) => {
    if (direction === "send" && msg.header.msg_type === "comm_msg") changes.add(msg.header.msg_id);
    if (msg.header.msg_type === "status" && msg.content.execution_state === "idle") {
      changes.delete(msg.parent_header.msg_id);
    }
  });
}"""

_RUN_ALL = """ms => Promise.race([
  window.jupyterapp.commands.execute("notebook:run-all-cells"),
  new Promise(resolve => setTimeout(() => resolve("timeout"), ms)),
])"""

_START_SECONDS = 60


def find_chromium() -> str | None:
    """The browser to use: `SPECNB_CHROMIUM`, else one on the path."""
    named = os.environ.get("SPECNB_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def lab_server(root: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves `root`, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="specnb-lab-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        _write_settings(home / "settings")
        port = _free_port()
        with open(home / "log", "w") as log:
            server = subprocess.Popen(_command(root, port), env=_environment(home), stdout=log, stderr=log)
            try:
                _wait_until_up(server, port, home / "log")
                yield f"http://127.0.0.1:{port}"
            finally:
                _stop(server)


def _write_settings(folder: Path) -> None:
    for key, values in _SETTINGS.items():
        plugin, name = key.split(":")
        path = folder / plugin / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(root: Path, port: int) -> list[str]:
    flags = {
        "ip": "127.0.0.1",
        "port": port,
        "ServerApp.port_retries": 0,
        "IdentityProvider.token": "",
        "ServerApp.disable_check_xsrf": True,
        "ServerApp.root_dir": root,
        "LabApp.expose_app_in_browser": True,
        "LabApp.extension_manager": "readonly",
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *given]


def _environment(home: Path) -> dict[str, str]:
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return {**os.environ, **{name: str(home / sub) for name, sub in folders.items()}, "SPECNB_MODE": "fast"}


def _wait_until_up(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended while it started:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=1).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within {_START_SECONDS} s:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


class Lab:
    """One page of JupyterLab, as a reader uses it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url, self.notebook = page, url, ""

    def open(self, notebook: str, timeout: float = 60) -> None:
        self.notebook = notebook
        self.page.goto(f"{self.url}/lab/tree/{notebook}?reset")
        self.page.wait_for_function(_READY, timeout=timeout * 1000)
        self.page.evaluate(_WATCH)

    def run_all(self, timeout: float = 60) -> None:
        """Run every cell; an error output, or text on stderr, fails with what it says."""
        done = self.page.evaluate(_RUN_ALL, timeout * 1000)
        complaints = self.complaints()
        if done is not True or complaints:
            raise AssertionError(f"run-all ended with {done!r}: " + "\n".join(complaints)[:3000])

    def complaints(self) -> list[str]:
        errors = self.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")
        broken = self.page.locator(".jp-OutputArea-output", has_text="Error displaying widget")
        dialogs = self.page.locator(".jp-Dialog")
        return [text for found in (errors, broken, dialogs) for text in found.all_inner_texts()]

    def run_code(self, code: str) -> str:
        """What the notebook's kernel prints for some code, beside the cells; it sees all that was clicked before."""
        self._settle()
        return self._execute(code)

    def _settle(self) -> None:
        """Wait until kernel and page agree: a widget holds a change back while an earlier one is under way."""
        for _ in range(2):
            self._execute("")  # by then the page has sent what the last answer set free
            self.page.wait_for_function("() => window.changesUnderWay.size === 0")

    def _execute(self, code: str) -> str:
        return self.page.evaluate(
            """async code => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              const future = kernel.requestExecute({ code, store_history: false });
              let printed = "";
              future.onIOPub = message => { printed += message.content.text ?? message.content.evalue ?? ""; };
              await future.done;
              return printed.trim();
            }""",
            code,
        )

    def start_code(self, code: str) -> None:
        """Send code to the kernel and do not wait for it."""
        self.page.evaluate(
            """code => {
              window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({ code });
            }""",
            code,
        )

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def interrupt(self) -> None:
        kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        self.page.evaluate(f"() => {kernel}.interrupt()")
        self.page.wait_for_function(f"() => {kernel}.status === 'idle'")

    def kernel_status(self) -> str:
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status")

    def active_cell(self) -> int:
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex")

    def output(self, selector: str) -> Locator:
        return self.page.locator(f".jp-OutputArea-output {selector}")

    def set_theme(self, name: str) -> None:
        self.page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
        light = str("Light" in name).lower()
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{light}'")

    def shut_down(self) -> None:
        """End the kernel of this page's notebook; other pages keep theirs."""
        for session in self.page.request.get(f"{self.url}/api/sessions").json():
            if session["path"] == self.notebook:
                self.page.request.delete(f"{self.url}/api/sessions/{session['id']}")
