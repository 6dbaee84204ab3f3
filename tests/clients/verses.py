"""verses.py BINARY: the 108 verses that glm5-nano knows by heart, through chat at temperature 0: streamed and whole,
alone and 16 at a time. Then half of them behind two earlier turns, which fill pages: with prefix hits, and with
sequences that are preempted. In each mode all texts have to be those of the first."""
from concurrent.futures import ThreadPoolExecutor

from common import MODEL, Checks, Server, at_rest, call, frames, joined, metrics, script, verses

check = Checks()
ALL = verses()
KNOWN = 105  # of 108; exact arithmetic loses one


def alone(i):
    return [{"role": "user", "content": ALL[i][0]}]


def behind_turns(i):
    """A prompt of several pages, most of it the same at every ask."""
    turns = []
    for before in (i - 2, i - 1):
        turns += [{"role": "user", "content": ALL[before][0]}, {"role": "assistant", "content": ALL[before][1]}]
    return turns + alone(i)


def whole(url, messages):
    body = {"model": MODEL, "messages": messages, "temperature": 0}
    return call(url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]


def streamed(url, messages):
    return joined(frames(url, {"model": MODEL, "messages": messages, "temperature": 0}))


def run(server, name, prompt, how, at_once, expected=None, exact_too=False):
    numbers = range(0, len(ALL), 1 if prompt is alone else 2)
    before = metrics(server.url)
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(lambda i: how(server.url, prompt(i)), numbers))
    after = metrics(server.url)
    grown = {n: int(after[f"lockstep_{n}_total"] - before[f"lockstep_{n}_total"]) for n in ("cached_tokens", "preemptions")}
    exact = sum(t == ALL[i][1] for t, i in zip(texts, numbers))
    others = [ALL[i][0] for t, e, i in zip(texts, expected or texts, numbers) if t != e]
    told = f"{exact} of {len(texts)} exact, {grown['cached_tokens']} cached tokens, {grown['preemptions']} preemptions"
    good = not others and (exact >= KNOWN or not exact_too)
    check(name, good, told + (f"; others than first: {others}" if others else ""))
    return texts, grown


binary = script(__doc__)
with Server(binary, "--cache-tokens", "65536") as server:
    first, _ = run(server, "whole, alone", alone, whole, 1, exact_too=True)
    for name, how, at_once in [("streamed, alone", streamed, 1), ("whole, 16 at a time", whole, 16),
                               ("streamed, 16 at a time", streamed, 16)]:
        run(server, name, alone, how, at_once, first, exact_too=True)
    long, fresh = run(server, "behind turns, whole, alone", behind_turns, whole, 1)
    for name, how, at_once in [("behind turns, again, streamed, alone", streamed, 1),
                               ("behind turns, again, whole, 16 at a time", whole, 16)]:
        _, grown = run(server, name, behind_turns, how, at_once, long)
        check("prefix hits were counted", grown["cached_tokens"] > fresh["cached_tokens"] + 1000, grown["cached_tokens"])
    check("at rest afterwards", at_rest(server.url) is not None)
# A cache of one context for 16 sequences of three to eight pages: some give theirs back, and are run again.
with Server(binary, "--cache-tokens", "384", "--sequences", "16") as server:
    for name, how in [("few pages, behind turns, whole, 16 at a time", whole),
                      ("few pages, behind turns, streamed, 16 at a time", streamed)]:
        _, grown = run(server, name, behind_turns, how, 16, long)
        check("preemptions were forced", grown["preemptions"] > 0, grown["preemptions"])
    check("at rest afterwards", at_rest(server.url) is not None)
with Server(binary, "--chunk", "7") as server:
    run(server, "chunks of 7, behind turns, 16 at a time", behind_turns, streamed, 16, long)
check.exit()
