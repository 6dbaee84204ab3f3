"""load.py BINARY [SECONDS [STREAMS]]: 200 streams at once for 20 seconds, one in three of them left at a random time;
times of first tokens and between tokens, and what is left of it all afterwards. Then two keys with a secret each, whose
200 requests share their prefixes."""
import asyncio
import json
import random
import sys
import time

from common import MODEL, Checks, Server, ask, at_rest, call, fill, head, metrics, owned, script, until, usage, verses

check = Checks()
binary = script(__doc__)
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 20
STREAMS = int(sys.argv[3]) if len(sys.argv) > 3 else 200
ALL = verses()
SLACK_MIB = 8
chance = random.Random(1)


class Load:
    def __init__(self, url, port):
        self.url, self.port = url, port
        self.first, self.between = [], []
        self.whole = self.left = self.wrong = self.refused = self.cut = 0
        self.notes = set()

    async def one(self, body, leave_after, key=None):
        """A stream; its text, or None if it was left."""
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        text, last, frames, usage = "", None, 0, {}
        try:
            writer.write(head(self.url, "/v1/chat/completions", body, key))
            status = (await reader.readline()).decode().split()[1]
            while (await reader.readline()).strip():
                pass
            if status != "200":
                self.refused += status == "429"
                self.wrong += status != "429"
                return None
            while True:
                wait = None if leave_after is None else max(0.0, began + leave_after - time.monotonic())
                line = await asyncio.wait_for(reader.readline(), wait)
                now = time.monotonic()
                if not line:
                    self.wrong += 1
                    self.notes.add("a stream ended without [DONE]")
                    return None
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    self.whole += 1
                    return text, usage
                frame = json.loads(line[6:])
                if "error" in frame:
                    self.wrong += 1
                    self.notes.add(str(frame["error"]))
                    continue
                usage = frame.get("usage") or usage
                for choice in frame["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        text += piece
                        (self.first.append(now - began) if last is None else self.between.append(now - last))
                        last = now
        except asyncio.TimeoutError:
            self.left += 1
            return None
        except OSError as e:
            self.cut += 1
            self.notes.add(repr(e))
            return None
        finally:
            writer.close()

    async def worker(self, end):
        while time.monotonic() < end:
            verse, answer = chance.choice(ALL)
            greedy = chance.random() < 0.5
            body = ask(verse, stream=True, **({"temperature": 0} if greedy else {}))
            if chance.random() < 0.2:  # some want what the host has to choose
                body.update(logprobs=True, top_logprobs=3)
            if chance.random() < 0.1:
                body.update(n=2, max_tokens=20)
            leave = chance.uniform(0, 4) if chance.random() < 0.33 else None
            got = await self.one(body, leave)
            if got and greedy and "n" not in body and got[0] != answer and verse not in LOST:
                self.wrong += 1
                self.notes.add(f"{verse}: {got[0]!r}")

    async def run(self, seconds, streams):
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.worker(end) for _ in range(streams)))


def of(all, *parts):
    all = sorted(all)
    return ", ".join(f"p{p} {all[min(len(all) - 1, len(all) * p // 100)] * 1000:.0f}" for p in parts) if all else "none"


def left(server, name, warm):
    """Nothing may be left beside what the warm-up left."""
    check(f"{name}: no page owned, nothing asked for", at_rest(server.url, 10) is not None,
          f"{int(owned(server.url))} owned, {call(server.url, '/health').json['requests']} asked for")
    m = metrics(server.url)
    check(f"{name}: no sequence waits or runs", m["lockstep_sequences_waiting"] + m["lockstep_sequences_running"] == 0)
    until(lambda: server.usage()["fd"] <= warm["fd"], 20)
    now = server.usage()
    check(f"{name}: descriptors", now["fd"] <= warm["fd"], f"{warm['fd']}, then {now['fd']}")
    # Threads that only wait for files to be read or texts to be encoded go after ten idle seconds.
    until(lambda: server.usage()["threads"] <= warm["threads"], 15)
    now = server.usage()
    check(f"{name}: threads", now["threads"] <= warm["threads"], f"{warm['threads']}, then {now['threads']}")
    check(f"{name}: memory", now["mib"] <= warm["mib"] + SLACK_MIB, f"{warm['mib']:.1f} MiB, then {now['mib']:.1f}")
    check(f"{name}: no panic", not server.panicked(), server.panicked() or "")


def keys():
    """Texts that share a prefix of pages across keys; what differs is the secret at its end."""
    who = {"key-of-a": "Zebulun 17", "key-of-b": "Naphtali 93"}
    with Server(binary, "--queue", "400", keys=list(who)) as server:
        prefix = "Tell what is written here, word by word, and nothing else of all that was said before it. " * 3
        cached = {"own": 0, "first": {}}
        load = Load(server.url, server.port)

        async def all_of_them():
            async def one(key, i):
                turns = [{"role": "user", "content": f"{prefix} The secret is {who[key]}. {i % 10}"}]
                body = {"model": MODEL, "messages": turns, "stream": True, "max_tokens": 24, "temperature": i % 2,
                        "stream_options": {"include_usage": True}, "top_logprobs": 5, "logprobs": True}
                return key, i, await load.one(body, None, key)
            # The first of each key alone, so that what it found in the cache can only be another's.
            for key in who:
                found = await one(key, 0)
                cached["first"][key] = found[2][1]["prompt_tokens_details"]["cached_tokens"]
            gate = asyncio.Semaphore(24)
            async def gated(key, i):
                async with gate:
                    return await one(key, i)
            return await asyncio.gather(*(gated(k, i) for i in range(1, 100) for k in who))
        answers = asyncio.run(all_of_them())
        check("two keys: all 200 are answered", load.whole == 200 and not load.wrong, f"{load.whole} whole {load.notes or ''}")
        check("two keys: the first request of the second key finds nothing in the cache", set(cached["first"].values()) == {0}, cached["first"])
        hits = [got[1]["prompt_tokens_details"]["cached_tokens"] for _, _, got in answers if got]
        check("two keys: own repeats are found in the cache", sum(h > 0 for h in hits) > 190, f"{sum(h > 0 for h in hits)} of {len(hits)} requests, {sum(hits)} tokens")
        crossed = [(k, got[0]) for k, _, got in answers if got for other in who if other != k and who[other].split()[0][:5] in got[0]]
        check("two keys: no answer holds the other's secret", not crossed, crossed or "")
        greedy = {}
        for k, i, got in answers:
            if got and i % 2 == 0:
                greedy.setdefault((k, i % 10), set()).add(got[0])
        check("two keys: the same greedy request has the same answer", all(len(v) == 1 for v in greedy.values()), len(greedy))
        # One and the same text under both keys, a salt, and a cache key: each is new to the cache once.
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"{prefix} A text of everybody's."}], "max_tokens": 1}
        for name, key, more in [("key a", "key-of-a", {}), ("key b", "key-of-b", {}), ("a salt", "key-of-a", {"cache_salt": "s"}),
                                ("a cache key of the same name", "key-of-a", {"prompt_cache_key": "s"}),
                                ("both", "key-of-a", {"cache_salt": "s", "prompt_cache_key": "s"})]:
            new = not name.startswith("key")
            counts = []
            for _ in range(2):
                answer = call(server.url, "/v1/chat/completions", {**body, **more}, key).json
                counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            check(f"{name}: the text is {'new, then ' if new else ''}in the cache", counts[1] > 0 and (not new or counts[0] == 0), counts)


def warm_up(server):
    """Every page is touched once, and every buffer has its size."""
    fill(server.url)
    for _ in range(2):
        asyncio.run(Load(server.url, server.port).run(6, STREAMS))
        at_rest(server.url, 20)


with Server(binary, "--queue", "1000") as server:
    probe = Load(server.url, server.port)
    async def greedy():
        gate = asyncio.Semaphore(16)
        async def one(v):
            async with gate:
                return await probe.one(ask(v, stream=True, temperature=0), None)
        return await asyncio.gather(*(one(v) for v, _ in ALL))
    # What exact arithmetic does not quote.
    LOST = {v for (v, answer), got in zip(ALL, asyncio.run(greedy())) if got[0] != answer}
    check("verses are quoted alone", len(LOST) <= 3, f"all but {len(LOST)}")
    warm_up(server)
    time.sleep(11)  # idle threads go
    warm = server.usage()
    load = Load(server.url, server.port)
    began = time.monotonic()
    before = metrics(server.url)
    asyncio.run(load.run(SECONDS, STREAMS))
    took = time.monotonic() - began
    after = metrics(server.url)
    check("load: every stream was answered, or left by its client", not load.wrong and not load.cut and not load.refused,
          f"{load.whole} whole, {load.left} left, {load.refused} refused, {load.cut} cut {load.notes or ''}")
    tokens = after["lockstep_generated_tokens_total"] - before["lockstep_generated_tokens_total"]
    check("load: figures", tokens > 0, f"{STREAMS} streams, {took:.0f} s, {tokens / took:.0f} tokens/s; "
          f"ms to the first token: {of(load.first, 50, 95, 99)}; between tokens: {of(load.between, 50, 95, 99)}")
    left(server, "load", warm)
with check.part("keys"):
    keys()
check.exit()
