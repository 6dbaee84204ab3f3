"""What the scripts have in common: a server of their own, requests by the standard library, checks, one line each."""
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse

MODEL = "glm5-nano"
VERSES = os.path.join(os.path.dirname(__file__), "..", "..", "goldens", "glm5-nano", "recall.json")


def verses():
    with open(VERSES) as f:
        return [(v["ask"], v["answer"]) for v in json.load(f)]


class Checks:
    """Prints a line for each check, and says at the end how the script exits."""

    def __init__(self):
        self.all, self.failed = 0, []

    def __call__(self, name, good, found=""):
        self.all += 1
        if not good:
            self.failed.append(name)
        print(f"{'ok  ' if good else 'FAIL'} {name}{f': {found}' if found != '' else ''}", flush=True)
        return good

    @contextlib.contextmanager
    def part(self, name):
        """What raises inside is a failed check."""
        try:
            yield
        except Exception as e:  # a script goes on to its next part, whatever this one met
            self(name, False, f"{type(e).__name__}: {str(e)[:300]}")

    def exit(self):
        print(f"{self.all - len(self.failed)} of {self.all} checks passed")
        sys.exit(1 if self.failed else 0)


class Server:
    """A server of a script's own, on a free port, with its stderr kept."""

    def __init__(self, binary, *flags, keys=None, port=None):
        if port is None:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.folder = tempfile.TemporaryDirectory()
        command = [binary, "serve", "--unverified", "--port", str(port), *flags]
        if keys:
            path = os.path.join(self.folder.name, "keys")
            with open(path, "w") as f:
                f.write("\n".join(keys) + "\n")
            command += ["--api-key-file", path]
        self.log = open(os.path.join(self.folder.name, "log"), "wb+")
        env = {**os.environ, "RUST_LOG": "warn"}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.log, env=env)
        self.pid = self.process.pid

    def __enter__(self):
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def wait_ready(self, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}: {self.stderr()[-500:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if call(self.url, "/health").status == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError("the server was not ready in time")

    def stderr(self):
        self.log.flush()
        with open(self.log.name, errors="replace") as f:
            return f.read()

    def panicked(self):
        return [line for line in self.stderr().splitlines() if "panicked" in line]

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def exit_within(self, seconds):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def usage(self):
        return usage(self.pid)


def usage(pid):
    """Descriptors, threads and MiB of a process."""
    status = open(f"/proc/{pid}/status").read()
    of = lambda name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1])
    return {"fd": len(os.listdir(f"/proc/{pid}/fd")), "threads": of("Threads"), "mib": of("VmRSS") / 1024}


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        try:
            return self.json["error"]
        except (ValueError, KeyError, TypeError):
            return {}

    @property
    def text(self):
        return self.json["choices"][0]["message"]["content"]


def connect(url, timeout=60):
    at = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(at.hostname, at.port, timeout=timeout)


def head(url, path, body, key=None, method="POST", more=""):
    """A request as bytes, for sockets that do what clients should not."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    key = f"authorization: Bearer {key}\r\n" if key else ""
    host = urllib.parse.urlsplit(url).netloc
    lines = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{key}{more}"
    return f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def raw(url, timeout=10):
    at = urllib.parse.urlsplit(url)
    return socket.create_connection((at.hostname, at.port), timeout=timeout)


def call(url, path, body=None, key=None, method=None, headers=None, timeout=60):
    connection = connect(url, timeout)
    try:
        all = {"content-type": "application/json"} if body is not None else {}
        if key:
            all["authorization"] = f"Bearer {key}"
        all.update(headers or {})
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, all)
        got = connection.getresponse()
        return Answer(got.status, got.headers, got.read())
    finally:
        connection.close()


def ask(text, **more):
    """The body of a chat with one user message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def chat(url, text, key=None, **more):
    return call(url, "/v1/chat/completions", ask(text, **more), key)


def frames(url, body, path="/v1/chat/completions", key=None, timeout=60):
    """The frames of a stream, checked to end with [DONE]."""
    got = call(url, path, {**body, "stream": True}, key, timeout=timeout)
    if got.status != 200:
        raise RuntimeError(f"{got.status}: {got.body[:300]}")
    parts = [p for p in got.body.decode().split("\n\n") if p and not p.startswith(":")]
    assert parts[-1] == "data: [DONE]" and all(p.startswith("data: ") for p in parts), parts[-1]
    return [json.loads(p[6:]) for p in parts[:-1]]


def joined(all, choice=0):
    of = [c for f in all for c in f["choices"] if c["index"] == choice]
    return "".join(c["delta"].get("content") or "" for c in of)


def metrics(url):
    found = {}
    for line in call(url, "/metrics").body.decode().splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def owned(url):
    return metrics(url)['lockstep_pages{state="owned"}']


def fill(url):
    """Writes to every page of the cache once: what is never written takes no memory."""
    at = 0
    while metrics(url)['lockstep_pages{state="free"}'] > 2 and at < 500:
        call(url, "/v1/completions", {"model": MODEL, "prompt": [100 + at + i for i in range(380)], "max_tokens": 2})
        at += 1


def at_rest(url, seconds=5):
    """Seconds until no page is owned and nothing is asked for; None if that does not come in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if owned(url) == 0 and call(url, "/health").json["requests"] == 0:
            return time.monotonic() - began
        time.sleep(0.01)
    return None


def until(what, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.005)
    return None


def script(doc, own=True):
    """The one argument of a script: a binary to start, or with own=False the URL of a server."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(doc)
    return os.path.abspath(sys.argv[1]) if own else sys.argv[1].rstrip("/")
