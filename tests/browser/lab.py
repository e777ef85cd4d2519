"""A real JupyterLab (or Notebook 7) in a real Chromium, with nothing outside this machine in reach."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CONFIG = """
c.ServerApp.token = "secret"
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.disable_check_xsrf = True
c.LabApp.expose_app_in_browser = True
c.JupyterNotebookApp.expose_app_in_browser = True
c.LabApp.news_url = ""
"""
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of code cells."""
    import nbformat

    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, path)


@contextmanager
def server(folder: Path, *, home: Path, app: str = "lab"):
    """Start a server on ``folder``; gives its address."""
    port = free_port()
    config = home / "config"
    config.mkdir()
    for plugin, values in SETTINGS.items() if app == "lab" else ():
        path = config / "lab" / "user-settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    (config / "jupyter_server_config.py").write_text(CONFIG)
    env = {
        **os.environ,
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTERLAB_SETTINGS_DIR": str(config / "lab" / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "OMP_NUM_THREADS": "1",
    }
    command = ["jupyter", app, "--no-browser", f"--port={port}", "--ip=127.0.0.1", f"--notebook-dir={folder}"]
    with _serving(command, folder, env, log=home / "server.log", port=port, probe="/api?token=secret") as address:
        yield address


@contextmanager
def marimo(folder: Path, app: str, *, home: Path):
    """Run a marimo app; gives its address."""
    port = free_port()
    env = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "MARIMO_SKIP_UPDATE_CHECK": "1"}
    command = ["marimo", "run", app, "--headless", "--no-token", f"--port={port}", "--host=127.0.0.1"]
    with _serving(command, folder, env, log=home / "marimo.log", port=port, probe="/health") as address:
        yield address


@contextmanager
def _serving(command: list[str], folder: Path, env: dict[str, str], *, log: Path, port: int, probe: str):
    """Run a module as a server until it is no longer wanted; gives its address once it answers."""
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=env, stdout=out, stderr=subprocess.STDOUT, cwd=folder
        )
        try:
            _wait_for(f"{address}{probe}", process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + 90
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(address, timeout=2).read()
            return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"no server after 90 s: {log.read_text()[-2000:]}")


class Lab:
    """One page with one notebook."""

    def __init__(self, context, address: str, *, app: str = "lab") -> None:
        self.address, self.app = address, app
        self.outside: list[str] = []
        self.page_errors: list[str] = []
        self.page = context.new_page()
        self.page.route("**/*", self._local_only)
        self.page.on("pageerror", lambda e: self.page_errors.append(str(e)))

    def _local_only(self, route) -> None:
        url = route.request.url
        if url.startswith((self.address, "data:", "blob:", "about:")):
            route.continue_()
        else:
            self.outside.append(url)
            route.abort()

    def open(self, notebook: str) -> None:
        """Open a notebook and wait for its kernel."""
        where = f"lab/tree/{notebook}" if self.app == "lab" else f"notebooks/{notebook}"
        self.page.goto(
            f"{self.address}/{where}?token=secret&reset"
            if self.app == "lab"
            else f"{self.address}/{where}?token=secret"
        )
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
        self.page.wait_for_function(
            "() => { const a = window.jupyterapp; if (!a) return false; const w = a.shell.currentWidget;"
            " return w && w.context && w.context.sessionContext.session && w.context.sessionContext.session.kernel"
            " && w.context.sessionContext.session.kernel.status === 'idle'; }",
            timeout=90_000,
        )

    def command(self, name: str, args: dict | None = None) -> None:
        """Run a command of the application and wait for it."""
        self.page.evaluate("([n, a]) => window.jupyterapp.commands.execute(n, a)", [name, args or {}])

    def run_all(self, timeout_s: float = 120) -> None:
        """Run every cell; raises if one fails."""
        self.page.evaluate(
            "() => { window.__done = false; "
            "window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.__done = true; }); }"
        )
        self.page.wait_for_function("() => window.__done", timeout=timeout_s * 1000)
        failed = self.page.locator("[data-mime-type='application/vnd.jupyter.error']")
        if failed.count():
            raise AssertionError(failed.first.inner_text())

    def kernel(self, code: str) -> str:
        """Run code in the notebook's kernel; returns what it prints, raises if it raises."""
        out = self.page.evaluate(
            """async (code) => {
              const kernel = window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
              const future = kernel.requestExecute({code, store_history: false});
              let text = '', error = '';
              future.onIOPub = m => {
                if (m.header.msg_type === 'stream') text += m.content.text;
                if (m.header.msg_type === 'error') error = m.content.traceback.join('\\n');
              };
              await future.done;
              return [text, error];
            }""",
            code,
        )
        if out[1]:
            raise AssertionError(out[1])
        return out[0].strip()

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark"."""
        self.command("apputils:change-theme", {"theme": name})
        dark = "false" if "Dark" in name else "true"
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{dark}'", timeout=20_000)

    def save(self) -> None:
        """Save the notebook."""
        self.command("docmanager:save")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=20_000)


@contextmanager
def browser():
    """Chromium, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        found = engine.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield found
        found.close()
