"""malformed.py BINARY [COUNT [SEED]]: every field of the protocol with bad values, each refused with 400 and its name;
routes, methods, content types, sizes; then 10,000 requests that are wrong as bytes: sockets closed early, bodies cut or
without end, wrong lengths, damaged JSON. The server has to live, answer, keep its memory, and never panic."""
import json
import random
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import MODEL, Checks, Server, ask, at_rest, call, chat, connect, fill, head, owned, raw, script, until

check = Checks()
binary = script(__doc__)
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SLACK_MIB = 8


class Text(str):
    """A value that stands in a body as it is typed."""


HUGE = Text("123456789012345678901234567890")
INF = Text("1e999")
NAN = Text("NaN")
U64 = Text("18446744073709551615")


def dumps(value):
    """JSON, with values as they are typed."""
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


NO_STRING = [1, True, [], {}, 1.5]
NO_FLAG = ["true", 1, 0, [], {}]
NO_OBJECT = ["x", 1, True, [], [1]]
NO_NUMBER = ["1", True, [], {}, INF, HUGE]
NO_INTEGER = ["1", True, [], {}, 1.5, INF, HUGE]


def user(**more):
    return [{"role": "user", "content": "x", **more}]


def assistant(**more):
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **more}, {"role": "user", "content": "z"}]


def call_of(**function):
    return [{"id": "c", "type": "function", "function": {"name": "f", **function}}]


# Fields that chat and plain completions share: the name, bad values, and the param of the error where it is another.
BOTH = [
    ("model", NO_STRING, None),
    ("max_tokens", [0, -1, U64, *NO_INTEGER], None),
    ("max_completion_tokens", [0, -1, U64, *NO_INTEGER], None),
    ("temperature", [-0.1, 2.1, *NO_NUMBER], None),
    ("top_p", [-0.1, 1.1, *NO_NUMBER], None),
    ("top_k", [-2, *NO_INTEGER], None),
    ("min_p", [-0.1, 1.1, *NO_NUMBER], None),
    ("seed", [U64, *NO_INTEGER], None),
    ("n", [0, -1, 17, 100000, *NO_INTEGER], None),
    ("stop", [1, True, {}, "", ["a", ""], [1], [None], ["x"] * 17, "y" * 257, ["x"] * 1_000_000], None),
    ("stop_token_ids", ["1", 1, {}, [-1], [4096], [1.5], ["1"], [HUGE], [1] * 100_000], None),
    ("ignore_eos", NO_FLAG, None),
    ("include_stop_str_in_output", NO_FLAG, None),
    ("min_tokens", [-1, *NO_INTEGER], None),
    ("presence_penalty", [-2.1, 2.1, *NO_NUMBER], None),
    ("frequency_penalty", [-2.1, 2.1, *NO_NUMBER], None),
    ("logit_bias", [*NO_OBJECT, {"4096": 1}, {"-1": 1}, {"x": 1}, {"1.0": 1}, {"5": 101}, {"5": -101}, {"5": "1"}, {"5": None},
                    {"5": INF}, {"": 1}, {"99999999999999999999": 1}], None),
    ("stream", NO_FLAG, None),
    ("cache_salt", NO_STRING, None),
    ("prompt_cache_key", NO_STRING, None),
    ("best_of", [2, "x", 1.5], None),
    ("suffix", ["x"], None),
    ("functions", [[{"name": "f"}]], None),
    ("function_call", ["auto", {"name": "f"}], None),
    ("audio", [{"voice": "x"}], None),
    ("modalities", [["audio"], ["text", "audio"]], None),
    ("prediction", [{"type": "content", "content": "x"}], None),
    ("response_format", ["text", 1, [], {}, {"type": "xml"}, {"type": 1}], None),
    ("stream_options", [*NO_OBJECT, {"include_usage": True}], None),
]
ONLY_CHAT = [
    ("messages", [None, 1, "x", True, {}, [], [1], ["x"], [None], [[]]], "messages"),
    ("messages", [[{}], [{"content": "x"}], [{"role": None}], [{"role": "User", "content": "x"}], [{"role": "function", "content": "x"}],
                  [{"role": 1, "content": "x"}], [{"role": ["user"], "content": "x"}]], "messages[0].role"),
    ("messages", [user(content=1), user(content=True), user(content={})], "messages[0].content"),
    ("messages", [user(content=[c]) for c in (1, "x", {}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "file", "file": {}},
                                            {"type": "input_audio", "input_audio": {}}, {"text": "x"}, {"type": "text"}, {"type": "text", "text": 1})],
     "messages[0].content"),
    ("messages", [[*user(), *user(), *user(), *user(content=5)]], "messages[3].content"),
    ("messages", [assistant(tool_calls=c) for c in (1, "x", {}, True)], "messages[1].tool_calls"),
    ("messages", [assistant(tool_calls=[c]) for c in (1, "x", {}, {"function": 1})], "messages[1].tool_calls[0]"),
    ("messages", [assistant(tool_calls=call_of(arguments=a)) for a in ("[1]", "1", '"x"', "{", "true", 1, [], True)],
     "messages[1].tool_calls[0].function.arguments"),
    ("messages", [assistant(reasoning_content=v) for v in NO_STRING], "messages[1].reasoning_content"),
    ("messages", [assistant(reasoning=v) for v in NO_STRING], "messages[1].reasoning"),
    ("logprobs", NO_FLAG, None),
    ("top_logprobs", [1, 0, *NO_INTEGER], None),
    ("chat_template_kwargs", NO_OBJECT, None),
    ("chat_template_kwargs", [{n: []} for n in ("messages", "tools", "add_generation_prompt")], "chat_template_kwargs"),
    ("thinking", NO_OBJECT, None),
    ("thinking", [{}, {"type": "on"}, {"type": 1}, {"type": True}], "thinking.type"),
    ("enable_thinking", NO_FLAG, None),
    ("reasoning_effort", NO_STRING, None),
    ("tools", [1, "x", {}, [1], [{"type": "function", "function": {"name": "f"}}]], None),
    ("tool_choice", [1, [], {}, "some", "required", {"type": "function", "function": {"name": "f"}}], None),
]
ONLY_PLAIN = [
    ("prompt", [None, 1, True, {}, "", [], [[]], [""], [1, "x"], ["x", 1], [[1], "x", 2], [-1], [4096], [1.5], [None], [[4096]],
                [[1], [-1]], [HUGE], [INF], [True]], "prompt"),
    ("echo", NO_FLAG, None),
    ("logprobs", [-1, 21, "1", [], {}, 1.5, INF, HUGE], None),
    ("parse_special", NO_FLAG, None),
]


def fields(url):
    for path, base, table in [(CHAT, {"messages": user()}, BOTH + ONLY_CHAT), (PLAIN, {"prompt": "x"}, BOTH + ONLY_PLAIN)]:
        for name, values, param in table:
            bad = []
            for value in values:
                body = {"model": MODEL, "max_tokens": 1, **base, name: value}
                if name == "top_logprobs" and value not in (0, 1):
                    body["logprobs"] = True
                if name == "stream_options" and value != {"include_usage": True}:
                    body["stream"] = True
                got = call(url, path, dumps(body).encode())
                found = got.error.get("param") or ""
                # A number that no double holds is no JSON for most readers: then there is no field to name.
                no_json = "1e999" in dumps(value) and got.error.get("code") == "invalid_json"
                good = got.status == 400 and (found.startswith(param or name) or no_json)
                good = good and got.error.get("type") == "invalid_request_error" and got.error.get("message")
                if not good:
                    bad.append(f"{dumps(value)[:80]} -> {got.status} {found!r} {got.body[:120]}")
            check(f"{path} {param or name}: {len(values)} bad values", not bad, "; ".join(bad))
    body = {"model": MODEL, "messages": user(), "max_tokens": 1, "top_logprobs": 21, "logprobs": True}
    check("top_logprobs 21", call(url, CHAT, body).error.get("param") == "top_logprobs")
    nulls = {name: None for name, _, _ in BOTH + ONLY_CHAT}
    got = call(url, CHAT, {**nulls, "model": MODEL, "messages": user(), "max_tokens": 1})
    check("null is absent, for every field of chat", got.status == 200, "" if got.status == 200 else got.body)
    nulls = {name: None for name, _, _ in BOTH + ONLY_PLAIN}
    got = call(url, PLAIN, {**nulls, "model": MODEL, "prompt": "x", "max_tokens": 1})
    check("null is absent, for every field of completions", got.status == 200, "" if got.status == 200 else got.body)
    fine = [{"seed": -(2**63)}, {"seed": 2**63 - 1}, {"temperature": 2}, {"top_p": 0}, {"top_k": -1}, {"top_k": 0}, {"min_p": 1}, {"n": 16},
            {"stop": []}, {"stop": ["x"] * 16}, {"logit_bias": {"0": -100, "4095": 100}}, {"logprobs": True}, {"user": "u"},
            {"metadata": {"a": 1}}, {"store": True}, {"service_tier": "auto"}, {"verbosity": "low"}, {"safety_identifier": "s"},
            {"response_format": {"type": "text"}}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"best_of": 1}, {"tools": []}]
    bad = [f"{m} -> {g.status} {g.body[:150]}" for m in fine if (g := call(url, CHAT, {**ask("x"), "max_tokens": 2, **m})).status != 200]
    check(f"{len(fine)} values at the limits are taken", not bad, "; ".join(bad))
    got = call(url, CHAT, {**ask("x"), "max_tokens": 1, "temprature": 1, "zß\n": 1})
    check("unknown fields are ignored and named in a header", got.status == 200 and "temprature" in (got.headers.get("x-lockstep-ignored") or ""),
          got.headers.get("x-lockstep-ignored"))
    for what, path, body in [("model", CHAT, {**ask("x"), "model": "gpt-4o"}), ("model", PLAIN, {"model": "", "prompt": "x"})]:
        got = call(url, path, body)
        check(f"{path} model {body['model']!r}: 404 model_not_found", (got.status, got.error.get("code")) == (404, "model_not_found"), got.body)
    for path, body, param in [(CHAT, {"messages": user()}, "model"), (PLAIN, {"prompt": "x"}, "model")]:
        got = call(url, path, {**body, "max_tokens": 1})
        check(f"{path} without model is answered, or refused by name", got.status == 200 or got.error.get("param") == param, got.status)
    for path, body in [(CHAT, ask("x", max_tokens=384)), (CHAT, ask("word " * 2000)), (PLAIN, {"model": MODEL, "prompt": "x", "max_tokens": 10**15}),
                       (PLAIN, {"model": MODEL, "prompt": [5] * 384}), (PLAIN, {"model": MODEL, "prompt": "x", "n": 16, "max_tokens": 384}),
                       (PLAIN, {"model": MODEL, "prompt": "x", "echo": True, "max_tokens": 2**62})]:
        got = call(url, path, body)
        message = got.error.get("message", "")
        check("over the context: 400 with its numbers", (got.status, got.error.get("code")) == (400, "context_length_exceeded") and "384" in message, message)
    got = call(url, PLAIN, {"model": MODEL, "prompt": ["x"] * 300, "max_tokens": 1})
    check("more answers than there are places: 400", got.status == 400, got.body[:150])
    for path, bodies in [("/tokenize", [{}, {"prompt": 1}, {"prompt": []}, {"prompt": ["a", "b"]}, {"messages": 1}, {"messages": []}, {"prompt": "x", "parse_special": 1}]),
                         ("/detokenize", [{}, {"tokens": 1}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [4096]}, {"tokens": ["x"]}, {"tokens": [[1]]}])]:
        for body in bodies:
            got = call(url, path, body)
            param = got.error.get("param") or ""
            check(f"{path} {body}: 400 by name", got.status == 400 and param.split("[")[0].split(".")[0] in (*body, "prompt", "tokens"), f"{got.status} {param} {got.body[:120]}")


def small(server):
    """A cache smaller than what one request may ask for."""
    url = server.url
    got = call(url, CHAT, ask("x", n=16, max_tokens=300, ignore_eos=True, temperature=1))
    check("n times the limit over the cache: answered, one after the other", got.status == 200 and len(got.json["choices"]) == 16, f"{got.status} {got.body[:150]}")
    check("and at rest", at_rest(url, 5) is not None)
    got = call(url, CHAT, ask("x", max_tokens=380))
    check("a limit over the cache: 400", got.status == 400, got.error.get("message"))


def routes(url):
    for path, allowed in [(CHAT, "POST"), (PLAIN, "POST"), ("/tokenize", "POST"), ("/detokenize", "POST"), ("/health", "GET"), ("/live", "GET"),
                          ("/metrics", "GET"), ("/v1/models", "GET"), (f"/v1/models/{MODEL}", "GET"), ("/v1/verification", "GET")]:
        bad = []
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"]:
            if method == allowed:
                continue
            got = call(url, path, method=method)
            if got.status != 405 or allowed not in (got.headers.get("allow") or "") or not got.error.get("message"):
                bad.append(f"{method} -> {got.status} {got.headers.get('allow')} {got.body[:100]}")
        check(f"{path}: other methods are 405 with Allow", not bad, "; ".join(bad))
    for path in ["/", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v1/engines", "//v1/models", "/v1/../health", "/%00", "/v1/embeddings", "/" + "x" * 9000]:
        for method in ("GET", "POST"):
            got = call(url, path, method=method)
            check(f"{method} {path[:30]}: 404 as JSON", got.status == 404 and got.error.get("code") == "not_found", f"{got.status} {got.body[:100]}")
    for name in ("x", "", "a/b", "%ff", MODEL + "/"):
        got = call(url, "/v1/models/" + name)
        check(f"/v1/models/{name}: 404 model_not_found", (got.status, got.error.get("code")) == (404, "model_not_found"), f"{got.status} {got.body[:100]}")
    good = json.dumps(ask("x", max_tokens=1)).encode()
    for kind in ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"]:
        got = call(url, CHAT, good, headers={"content-type": kind})
        check(f"content type {kind!r}: 415", got.status == 415 and got.error.get("message"), got.status)
    for kind in ["application/json; charset=utf-8", "APPLICATION/JSON"]:
        check(f"content type {kind!r}", call(url, CHAT, good, headers={"content-type": kind}).status == 200)
    large = b" " * (9 << 20)
    for name, path, more, expected in [("a body over the limit", CHAT, {}, 413), ("one in chunks", CHAT, {"chunks": True}, 413),
                                       ("a large body to nowhere", "/v1/nowhere", {}, 404), ("a large GET's", "/health", {}, 405)]:
        # A client that has not sent all of it yet must hear why: closed with bytes unread, it hears a reset alone.
        statuses = [patient(url, path, large, **more) for _ in range(5)]
        check(f"{name}: {expected}, and whoever still sends hears it", set(statuses) == {expected}, statuses)


def answer_of(s):
    """What comes until the other side closes."""
    all = b""
    try:
        while part := s.recv(65536):
            all += part
    except ConnectionError:
        pass
    return all


def status_of(all):
    return int(all.split(b" ", 2)[1]) if all.startswith(b"HTTP/1.1 ") else None


def patient(url, path, body, chunks=False):
    """The status that a client gets who sends all of a body first."""
    at = connect(url, 20)
    try:
        lines = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunks else body
        at.request("POST", path, lines, {"content-type": "application/json"}, encode_chunked=chunks)
        return at.getresponse().status
    except OSError as e:
        return type(e).__name__
    finally:
        at.close()


def bodies(url, server_mib):
    """Bodies that are no good JSON: each is answered with 400."""
    good = dumps(ask("x", max_tokens=1))
    deep = lambda open, close, n: open * n + close * n
    named = {
        "empty": b"", "blanks": b"  \n", "no JSON": b"x", "an array": b"[]", "a string": b'"x"', "null": b"null", "a number": b"1",
        "two values": b"{}{}", "cut": good[:-3].encode(), "a comma too many": b'{"model":"x",}', "NaN": good.replace("1}", "NaN}").encode(),
        "Infinity": good.replace("1}", "Infinity}").encode(), "a byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "UTF-16": good.encode("utf-16"), "bad UTF-8": good.replace("x", "\0").encode().replace(b"\0", b"\xff\xfe"),
        "overlong UTF-8": good.encode().replace(b'"x"', b'"\xc0\xaf"'), "a surrogate in UTF-8": good.encode().replace(b'"x"', b'"\xed\xa0\x80"'),
        "a lone surrogate": good.replace('"x"', r'"\ud800"').encode(), "surrogates turned round": good.replace('"x"', r'"\udc00\ud800"').encode(),
        "a bad escape": good.replace('"x"', r'"\x"').encode(), "a raw NUL": good.replace('"x"', '"\0"').encode(),
        "deep arrays": deep("[", "]", 100_000).encode(), "deep objects": ('{"a":' * 100_000 + "1" + "}" * 100_000).encode(),
        "deep arrays in a field": good.replace('"x"', deep("[", "]", 5000)).encode(),
        "deep kwargs": good[:-1].encode() + b',"chat_template_kwargs":{"a":' + deep("[", "]", 5000).encode() + b"}}",
        "deep ignored field": good[:-1].encode() + b',"zzz":' + deep("[", "]", 5000).encode() + b"}",
        "1e999": good.replace("1}", "1e999}").encode(), "a long number": good.replace("1}", "9" * 100_000 + "}").encode(),
        "10^6 stop strings": good[:-1].encode() + b',"stop":' + json.dumps(["a"] * 10**6).encode() + b"}",
    }
    for name, body in named.items():
        got = call(url, CHAT, body)
        check(f"body, {name}: 400", got.status == 400 and got.error.get("type") == "invalid_request_error", f"{got.status} {got.body[:140]}")
    before = server_mib()
    for i in range(24):
        s = raw(url)
        s.sendall(head(url, CHAT, {**ask("x", max_tokens=1), f"{i}" + "n" * (2 << 20): 1}, more="connection: close\r\n"))
        found = answer_of(s)
        s.close()
    grown = server_mib() - before
    check("24 unknown fields with names of 2 MiB: a short head, and not kept", found.find(b"\r\n\r\n") < 16384 and grown < 24, f"{len(found)} bytes, {grown:.0f} MiB more")
    s = raw(url)
    s.sendall(head(url, CHAT, {**ask("x", max_tokens=1), **{f"f{i}": 1 for i in range(300_000)}}, more="connection: close\r\n"))
    found = answer_of(s)
    s.close()
    check("300,000 unknown fields: a head of at most 16 KiB", found.index(b"\r\n\r\n") < 16384 if b"\r\n\r\n" in found else False,
          f"{len(found)} bytes, {found[:60]}")
    twice = good[:-1] + ',"max_tokens":2}'
    got = call(url, CHAT, twice.encode())
    check("duplicate keys: refused, or the last counts", got.status == 400 or got.json["usage"]["completion_tokens"] <= 2, got.status)
    for name, body in {"an escaped NUL": ask("\0", max_tokens=1), "a pair of surrogates": ask("\U0001f642", max_tokens=1), "private use": ask("\ue000\ufdd0\uffff", max_tokens=1),
                       "10^5 messages": {"model": MODEL, "messages": user(content="") * 100_000},
                       "all of private use": ask("".join(map(chr, [*range(0xfdd0, 0xfdf0), *range(0xe000, 0xf900)]))),
                       "a long text": ask("a" * (4 << 20)), "blanks": ask(" " * (4 << 20)), "marks": ask("<|user|>" * 500_000)}.items():
        began = time.monotonic()
        got = call(url, CHAT, body)
        took = time.monotonic() - began
        check(f"body, {name}: 200 or 400, within 10 s", got.status in (200, 400) and took < 10, f"{got.status} in {took:.1f} s: {got.body[:100]}")


def sockets(url, chance, kind):
    """One request that is wrong as bytes. What must be answered is checked here: an error in words, or None."""
    body = dumps(ask("x", max_tokens=chance.choice([1, 1, 30]), stream=chance.random() < 0.5)).encode()
    good = head(url, CHAT, body)
    s = raw(url, 20)
    try:
        if kind == "mid-header":
            s.sendall(good[: chance.randrange(1, good.index(b"\r\n\r\n"))])
        elif kind == "mid-body":
            s.sendall(good[: len(good) - chance.randrange(1, len(body))])
        elif kind == "half closed early":
            s.sendall(good[: chance.randrange(len(good) - 1)])
            s.shutdown(socket.SHUT_WR)
            answer_of(s)
        elif kind == "sent and gone":
            s.sendall(good)
        elif kind == "pipelined":
            n = chance.randrange(2, 6)
            plain = head(url, CHAT, dumps(ask("x", max_tokens=1)).encode())
            s.sendall(plain * n + head(url, "/live", b"", method="GET", more="connection: close\r\n"))
            found = answer_of(s).count(b"HTTP/1.1 200")
            if found != n + 1:
                return f"{found} answers to {n + 1} requests in one"
        elif kind == "chunked without end":
            s.sendall(good.split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(chance.randrange(4)):
                s.sendall(b"%x\r\n%s\r\n" % (len(body), body))
        elif kind == "chunked badly":
            bad = chance.choice([b"zz\r\nabc\r\n", b"-1\r\n\r\n", b"ffffffffffffffffffff\r\n", b"5\r\nabcdefg\r\n0\r\n\r\n", b"5;" + b"x" * 70_000])
            s.sendall(good.split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n" + bad)
            s.shutdown(socket.SHUT_WR)
            if status_of(answer_of(s)) not in (400, None):
                return f"chunks {bad[:20]} were taken"
        elif kind == "length too short":
            s.sendall(good.replace(b"content-length: %d" % len(body), b"content-length: %d" % chance.randrange(len(body)), 1))
            s.shutdown(socket.SHUT_WR)
            if status_of(answer_of(s)) == 200:
                return "a body cut by its length was answered"
        elif kind == "length too long":
            s.sendall(good.replace(b"content-length: %d" % len(body), b"content-length: %d" % (len(body) + 1), 1))
            s.shutdown(socket.SHUT_WR)
            if status_of(answer_of(s)) == 200:
                return "a body shorter than its length was answered"
        elif kind == "bad length":
            bad = chance.choice([b"-1", b"x", b"1e3", b"99999999999999999999999", b"0x10", b"5, 6", b""])
            s.sendall(good.replace(b"content-length: %d" % len(body), b"content-length: " + bad, 1))
            s.shutdown(socket.SHUT_WR)
            found = status_of(answer_of(s))
            if found not in (400, 413, None):
                return f"length {bad} -> {found}"
        elif kind == "both lengths":
            s.sendall(good.replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length", 1))
            s.shutdown(socket.SHUT_WR)
            if status_of(answer_of(s)) == 200:
                return "chunked and a length were taken, though the body is not chunked"
        elif kind == "no HTTP":
            s.sendall(bytes(chance.randrange(256) for _ in range(chance.randrange(1, 300))) + b"\r\n\r\n")
            s.shutdown(socket.SHUT_WR)
            if (found := status_of(answer_of(s))) not in (400, 404, 405, 414, 431, None):
                return f"noise -> {found}"
        elif kind == "large head":
            many = chance.random() < 0.5
            lines = "".join(f"x-{i}: y\r\n" for i in range(200)) if many else f"x: {'y' * 300_000}\r\n"
            try:
                s.sendall(head(url, CHAT, body, more=lines))
                s.shutdown(socket.SHUT_WR)
            except OSError:
                return None
            if (found := status_of(answer_of(s))) not in (400, 431, None):
                return f"a large head -> {found}"
        else:  # damaged: a byte of the body is another, or missing, or twice there
            data = bytearray(body)
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(data))
                what = chance.randrange(3)
                if what == 0:
                    data[at] = chance.randrange(256)
                elif what == 1:
                    del data[at]
                else:
                    data[at:at] = data[at : at + chance.randrange(1, 20)]
            path = chance.choice([CHAT, PLAIN, "/tokenize", "/detokenize"])
            s.sendall(head(url, path, bytes(data), more="connection: close\r\n"))
            all = answer_of(s)
            found = status_of(all)
            if found not in (200, 400, 404):
                return f"damaged {bytes(data)!r} to {path} -> {found} {all[-200:]!r}"
            if found != 200 and b'"error"' not in all:
                return f"damaged -> {found} without an error"
    except OSError as e:
        # Closed at the other side meanwhile: as good as any answer to most of these. A time-out is none.
        return "no answer in 20 s" if isinstance(e, TimeoutError) else None
    finally:
        s.close()
    return None


KINDS = ["mid-header", "mid-body", "half closed early", "sent and gone", "pipelined", "chunked without end", "chunked badly", "length too short",
         "length too long", "bad length", "both lengths", "no HTTP", "large head"] + ["damaged"] * 7


def many(server):
    url = server.url
    def some(worker):
        chance, wrong, each = random.Random(f"{SEED} {worker}"), [], {}
        for _ in range(COUNT // 8):
            kind = chance.choice(KINDS)
            each[kind] = each.get(kind, 0) + 1
            try:
                found = sockets(url, chance, kind)
            except Exception as e:
                found = f"{kind}: {type(e).__name__} {e}"
            if found:
                wrong.append(f"{kind}: {found}")
        return wrong, each
    def run(name, expect_flat):
        before = server.usage()
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(some, range(8)))
        took = time.monotonic() - began
        wrong = sorted({w for part, _ in found for w in part})
        total = sum(n for _, each in found for n in each.values())
        check(f"{name}: {total} wrong requests, each met as it has to be", not wrong, f"{took:.0f} s{'; ' + '; '.join(wrong[:8]) if wrong else ''}")
        check(f"{name}: alive, and at rest", server.process.poll() is None and at_rest(url, 10) is not None, f"{int(owned(url))} owned")
        until(lambda: server.usage()["fd"] <= before["fd"], 20)
        now = server.usage()
        check(f"{name}: descriptors", now["fd"] <= before["fd"], f"{before['fd']}, then {now['fd']}")
        if expect_flat:
            check(f"{name}: memory", now["mib"] <= before["mib"] + SLACK_MIB, f"{before['mib']:.1f} MiB, then {now['mib']:.1f}")
    run("the first time", False)
    run("the second time", True)


with Server(binary) as server:
    fill(server.url)
    for part in (fields, routes, bodies):
        with check.part(part.__name__):
            part(server.url, *([lambda: server.usage()["mib"]] if part is bodies else []))
            check(f"{part.__name__}: alive, no panic", server.process.poll() is None and not server.panicked(), server.panicked() or "")
    with check.part("many"):
        many(server)
    verse = chat(server.url, "John 13:17", temperature=0).text
    check("a good request is answered", verse == "If ye know these things, happy are ye if ye do them.", verse)
    check("no panic", not server.panicked(), server.panicked() or "")
    check("nothing worse than a warning in the log", " ERROR " not in server.stderr())
with Server(binary, "--cache-tokens", "320") as server, check.part("small"):
    small(server)
check.exit()
