"""Opens a page in a headless Chromium with the network off, and says what it drew and what its console said."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The browser that the variable BROWSER_PATH names, or one on the PATH."""
    named = os.environ.get("BROWSER_PATH")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(frozen=True)
class Opened:
    """A page once its scripts have run: its DOM as text, and the lines of its console."""

    dom: str
    console: list[str]


def open_page(browser: str, page: Path, profile: Path) -> Opened:
    """Opens a file and runs its scripts for 20 virtual seconds.

    Args:
        profile: a folder for what the browser keeps.
    """
    command = [
        browser, "--headless", "--disable-gpu", f"--user-data-dir={profile}", "--no-first-run",
        # CI runs as root, which Chromium refuses with its sandbox. The page is our own.
        "--no-sandbox", "--disable-dev-shm-usage",
        # No name has an address and no address answers.
        "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", "--disable-background-networking",
        "--enable-logging=stderr", "--virtual-time-budget=20000",
        "--window-size=1500,1400", "--hide-scrollbars", "--dump-dom",
        page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return Opened(done.stdout, re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", done.stderr))
