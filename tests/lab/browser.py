"""Chromium without a window, driven through a pipe (`--remote-debugging-pipe`, the DevTools protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress

from tests.lab.waiting import wait_for

PROGRAM = "chromium"


class Browser:
    """One page; what it asked for, and what went wrong in it, is kept."""

    def __init__(self, width=1100, height=900, dark=False):
        self.size, self.dark = (width, height), dark
        self.count, self.buffer, self.answers = 0, b"", {}
        self.errors, self.requests = [], []

    def __enter__(self):
        self.profile = tempfile.mkdtemp(prefix="c-")
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()

        def prepare():
            # It reads from 3 and writes to 4; neither may lie in the way of the other.
            saved_in, saved_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(saved_in, 3)
            os.dup2(saved_out, 4)

        command = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                   "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                   f"--user-data-dir={self.profile}", "about:blank"]
        env = dict(os.environ, HOME=self.profile, XDG_CONFIG_HOME=self.profile, XDG_CACHE_HOME=self.profile)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        close_fds=False, preexec_fn=prepare, env=env)
        os.close(theirs_in)
        os.close(theirs_out)
        self.session = None
        pages = wait_for(lambda: [one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"], "a page")
        self.session = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        width, height = self.size
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_exception):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        # Its children may still write there for a moment.
        for _ in range(50):
            with suppress(OSError):
                shutil.rmtree(self.profile)
                break
            time.sleep(0.1)

    def ask(self, method, **params):
        """One command, and its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        return wait_for(lambda: self.read() or self.answers.pop(message["id"], None), method, every=0)["result"]

    def read(self):
        """What has come in, for a moment; always None."""
        if not select.select([self.into], [], [], 0.1)[0]:
            return
        self.buffer += os.read(self.into, 1 << 20)
        *messages, self.buffer = self.buffer.split(b"\0")
        for message in map(json.loads, messages):
            method, params = message.get("method"), message.get("params")
            if "id" in message:
                assert "error" not in message, message
                self.answers[message["id"]] = message
            elif method == "Runtime.exceptionThrown" or method == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params)
            elif method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url):
        """Load a page."""
        self.ask("Page.navigate", url=url)

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self):
        """What can be read."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def wait_text(self, *words, timeout=30):
        """Wait until all of these can be read."""
        return wait_for(lambda: (text := self.text()) and all(word in text for word in words) and text,
                        lambda: f"{words} in\n{self.text()}", timeout, every=0.2)

    def screenshot(self, path):
        """The whole page as a PNG."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
