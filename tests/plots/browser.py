"""A real browser for the tests: Chromium without a window, spoken to over a pipe (DevTools protocol).

The mouse events are the browser's own, so that hovering and clicking go the way a reader's do.
"""

import json
import os
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a headless Chromium; use as a context manager."""

    def __init__(self, folder):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the protocol's pipes are file descriptors 3 and 4 of the browser
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        command = [
            *("bash", "-c", script, "bash", CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", "--window-size=1200,900"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session = None
        self.errors = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method, **parameters):
        """One command of the protocol and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise EOFError("the browser closed the pipe")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path):
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(200):
            if self.run("document.readyState") == "complete" and self.run("location.protocol") == "file:":
                return
            time.sleep(0.02)
        raise TimeoutError(f"{path} did not load")

    def run(self, expression):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def _middle(self, selector, index):
        box = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelectorAll({json.dumps(selector)})[{index}].getBoundingClientRect())"
        )
        return {"x": box[0], "y": box[1]}

    def hover(self, selector, index=0):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector, index))

    def click(self, selector, index=0):
        place = self._middle(selector, index)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path):
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
