"""openai_py.py BINARY: the openai package for Python against a server of its own: chat whole and streamed, the stream
helper, n, logprobs, usage, stop strings, seeds, models, errors as the package's exceptions, and a stream that is left."""
import math
import time

import openai

from common import MODEL, Checks, Server, at_rest, owned, script

check = Checks()
VERSE = "If ye know these things, happy are ye if ye do them."
ASKED = [{"role": "user", "content": "John 13:17"}]


def client(server, key="none", retries=0):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=retries, timeout=60)


def chats(ai):
    create = lambda **more: ai.chat.completions.create(model=MODEL, **{"messages": ASKED, **more})
    whole = create(temperature=0)
    choice = whole.choices[0]
    check("whole", (choice.message.content, choice.finish_reason, choice.message.role) == (VERSE, "stop", "assistant"), choice.message.content)
    check("what stands in a reply", whole.object == "chat.completion" and whole.id and whole.system_fingerprint and abs(whole.created - time.time()) < 60
          and whole.model == MODEL and choice.logprobs is None)
    usage = whole.usage
    check("usage", (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 17, 27)
          and usage.prompt_tokens_details.cached_tokens == 0 and usage.completion_tokens_details.reasoning_tokens == 0, usage.to_dict())

    frames = list(create(temperature=0, stream=True))
    deltas = [f.choices[0].delta for f in frames]
    check("streamed", "".join(d.content or "" for d in deltas) == VERSE)
    check("the first frame has the role and an empty text", (deltas[0].role, deltas[0].content) == ("assistant", ""), deltas[0].to_dict())
    check("no other has a role, or an empty text", all(d.role is None and d.content for d in deltas[1:-1]))
    check("the end has a frame of its own", deltas[-1].to_dict() == {} and [f.choices[0].finish_reason for f in frames] == [None] * (len(frames) - 1) + ["stop"])
    check("one id, no usage", len({f.id for f in frames}) == 1 and all("usage" not in f.to_dict() for f in frames))
    frames = list(create(temperature=0, stream=True, stream_options={"include_usage": True}))
    check("include_usage: null, then one frame without choices", frames[-1].choices == [] and frames[-1].usage.to_dict() == usage.to_dict()
          | {"prompt_tokens_details": frames[-1].usage.prompt_tokens_details.to_dict()} and all(f.usage is None and "usage" in f.model_dump(exclude_unset=True) for f in frames[:-1]),
          frames[-1].usage.to_dict())
    with ai.chat.completions.stream(model=MODEL, messages=ASKED, temperature=0, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    check("the stream helper", final.choices[0].message.content == VERSE and final.choices[0].finish_reason == "stop" and final.usage.completion_tokens == 17
          and {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds), sorted(set(kinds)))
    check("its logprobs are the tokens", "".join(t.token for t in final.choices[0].logprobs.content) == VERSE)

    odd = [{"role": "user", "content": "Tell of a \U0001f642"}]  # no verse: draws differ
    two = create(messages=odd, n=2, seed=5, max_tokens=12, temperature=1)
    texts = [c.message.content for c in two.choices]
    check("n=2: two answers, other draws, usage of both", [c.index for c in two.choices] == [0, 1] and texts[0] != texts[1] and two.usage.prompt_tokens == create(messages=odd, max_tokens=1).usage.prompt_tokens
          and 2 <= two.usage.completion_tokens <= 24, f"{texts} {two.usage.completion_tokens}")
    streamed = {0: "", 1: ""}
    ends = []
    for f in create(messages=odd, n=2, seed=5, max_tokens=12, temperature=1, stream=True):
        for c in f.choices:
            streamed[c.index] += c.delta.content or ""
            ends += [c.index] if c.finish_reason else []
    check("n=2 streamed: the same texts", list(streamed.values()) == texts and sorted(ends) == [0, 1], streamed)

    for name, more in [("greedy", {"temperature": 0}), ("drawn", {"temperature": 1.3, "seed": 3, "max_tokens": 40, "messages": odd}),
                       ("biased", {"temperature": 0, "logit_bias": {str(i): 20 for i in range(128, 256)}, "max_tokens": 12}),
                       ("penalised", {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 30})]:
        answer = create(logprobs=True, top_logprobs=5, **more)
        tokens = answer.choices[0].logprobs.content
        wrong = []
        for i, t in enumerate(tokens):
            top = {tuple(x.bytes): x.logprob for x in t.top_logprobs}
            values = [x.logprob for x in t.top_logprobs]
            if len(values) != 5 or values != sorted(values, reverse=True) or t.logprob > 0 or sum(map(math.exp, values)) > 1 + 1e-9:
                wrong.append(f"{i}: {t}")
            if tuple(t.bytes) in top and top[tuple(t.bytes)] != t.logprob or tuple(t.bytes) not in top and t.logprob > min(values):
                wrong.append(f"{i}: chosen {t.logprob}, top {values}")
            if name == "greedy" and t.logprob != values[0]:
                wrong.append(f"{i}: greedy, but not the likeliest")
        text = b"".join(bytes(t.bytes) for t in tokens).decode(errors="replace")
        check(f"logprobs, {name}: in order, at their place, of the whole text", tokens and not wrong and text == answer.choices[0].message.content, wrong[:2] or "")
        other = create(logprobs=True, top_logprobs=5, stream=True, **more)
        joined = [t.to_dict() for f in other for c in f.choices if c.logprobs for t in c.logprobs.content or []]
        check(f"logprobs, {name}: streamed the same", joined == [t.to_dict() for t in tokens])
    alone = create(logprobs=True, max_tokens=3).choices[0].logprobs.content
    check("logprobs alone: no top", len(alone) <= 3 and all(t.top_logprobs == [] for t in alone))

    stopped = create(temperature=0, stop=["happy", "zzz"]).choices[0]
    check("a stop string cuts", (stopped.message.content, stopped.finish_reason) == (VERSE.split("happy")[0], "stop"), stopped.message.content)
    cut = list(create(temperature=0, stop="ye if ye", stream=True))
    check("and in a stream", "".join(c.delta.content or "" for f in cut for c in f.choices) == VERSE.split("ye if ye")[0])
    kept = create(temperature=0, stop="happy", extra_body={"include_stop_str_in_output": True}).choices[0]
    check("or is kept", kept.message.content == VERSE.split("happy")[0] + "happy", kept.message.content)
    short = create(temperature=0, max_completion_tokens=4, max_tokens=9)
    check("max_completion_tokens wins, and ends with length", short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 4)

    draw = lambda **more: create(messages=odd, max_tokens=16, **more)
    same = {draw(seed=11).choices[0].message.content for _ in range(3)}
    fresh = [draw() for _ in range(4)]
    texts = {a.choices[0].message.content for a in fresh}
    check("a seed is repeated, none is fresh", len(same) == 1 and len(texts) > 1, f"{len(same)} and {len(texts)}")
    free = create(messages=odd, n=4, max_tokens=16)
    check("answers of one request differ without a seed", len({c.message.content for c in free.choices}) > 1)
    again = draw(seed=fresh[0].model_extra["lockstep"]["seed"])
    check("the reply tells the seed that was drawn", again.choices[0].message.content == fresh[0].choices[0].message.content, fresh[0].model_extra["lockstep"])
    parts = create(temperature=0, messages=[{"role": "user", "content": [{"type": "text", "text": "John"}, {"type": "text", "text": " 13:17"}]}])
    check("parts of text are joined", parts.choices[0].message.content == VERSE)

    plain = ai.completions.create(model=MODEL, prompt="In the beginning God", max_tokens=8, temperature=0, logprobs=2, echo=True)
    lists = plain.choices[0].logprobs
    check("completions with echo: the prompt stands before the text, its first token has no logprob",
          plain.choices[0].text.startswith("In the beginning God") and lists.token_logprobs[0] is None and all(x <= 0 for x in lists.token_logprobs[1:])
          and "".join(lists.tokens) == plain.choices[0].text and len(lists.tokens) == len(lists.text_offset) == len(lists.top_logprobs), plain.choices[0].text)
    wrong = [i for i, top in enumerate(lists.top_logprobs) if top and top[lists.tokens[i]] != lists.token_logprobs[i]]
    check("each token is among its own top", not wrong, wrong or "")
    texts = [plain.choices[0].text[o : o + len(t)] for o, t in zip(lists.text_offset, lists.tokens)]
    check("offsets point at the tokens", texts == lists.tokens)
    scored = ai.completions.create(model=MODEL, prompt=plain.choices[0].text, max_tokens=0, logprobs=2, echo=True).choices[0].logprobs
    check("scored again, all tokens cost the same", scored.tokens == lists.tokens and all(abs(a - b) < 1e-4 for a, b in zip(scored.token_logprobs[1:], lists.token_logprobs[1:])))
    ids = ai.completions.create(model=MODEL, prompt=[[100, 101], [102]], max_tokens=3, n=2)
    check("two prompts of ids, two answers each", [c.index for c in ids.choices] == [0, 1, 2, 3] and ids.usage.prompt_tokens == 3)
    text = "".join(c.text for f in ai.completions.create(model=MODEL, prompt="In the beginning God", max_tokens=8, temperature=0, stream=True, echo=True) for c in f.choices)
    check("completions streamed", text == plain.choices[0].text, text)


def models(ai):
    listed = list(ai.models.list())
    check("models: list", [m.id for m in listed] == [MODEL] and listed[0].object == "model" and listed[0].model_extra["max_model_len"] == 384)
    check("models: retrieve", ai.models.retrieve(MODEL).id == MODEL)


def raised(kind, what):
    try:
        what()
    except kind as e:
        return e
    except openai.OpenAIError as e:
        return check("another class of error", False, repr(e))
    return None


def errors(ai):
    create = lambda **more: ai.chat.completions.create(**{"model": MODEL, "messages": ASKED, **more})
    for name, kind, what, expected in [
        ("an unknown model", openai.NotFoundError, lambda: create(model="gpt-4o"), (404, "model_not_found", "model")),
        ("an unknown model, retrieved", openai.NotFoundError, lambda: ai.models.retrieve("gpt-4o"), (404, "model_not_found", "model")),
        ("over the context", openai.BadRequestError, lambda: create(max_tokens=384), (400, "context_length_exceeded", "messages")),
        ("a long text", openai.BadRequestError, lambda: create(messages=[{"role": "user", "content": "word " * 400}]), (400, "context_length_exceeded", "messages")),
        ("a stream over the context", openai.BadRequestError, lambda: create(max_tokens=384, stream=True), (400, "context_length_exceeded", "messages")),
        ("temperature 3", openai.BadRequestError, lambda: create(temperature=3), (400, "invalid_value", "temperature")),
        ("tools", openai.BadRequestError, lambda: create(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]), (400, "invalid_value", "tools")),
        ("an image", openai.BadRequestError, lambda: create(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
         (400, "invalid_value", "messages[0].content[0]")),
        ("embeddings", openai.NotFoundError, lambda: ai.embeddings.create(model=MODEL, input="x"), (404, "not_found", None)),
    ]:
        e = raised(kind, what)
        check(f"{name}: {kind.__name__}", e and (e.status_code, e.code, e.param) == expected and e.request_id, e and (e.status_code, e.code, e.param))
    e = raised(openai.BadRequestError, lambda: create(max_tokens=380))
    check("over the context: the message has prompt, limit and context", e and all(n in e.message for n in ("10", "380", "384")), e and e.message)


def left(server, ai):
    stream = ai.chat.completions.create(model=MODEL, messages=ASKED, stream=True, max_tokens=360, extra_body={"ignore_eos": True})
    for _, frame in zip(range(5), stream):
        pass
    had = owned(server.url)
    stream.close()
    took = at_rest(server.url, 2)
    check("a stream that is left frees its pages within 1 s", had > 0 and took is not None and took < 1, f"{int(had)} pages, {took} s")


def full(binary):
    with Server(binary, "--sequences", "1", "--queue", "1") as server:
        ai, patient = client(server), client(server, retries=6)
        long = lambda c: c.chat.completions.create(model=MODEL, messages=ASKED, stream=True, max_tokens=360, extra_body={"ignore_eos": True})
        streams = [long(ai), long(ai)]
        e = raised(openai.RateLimitError, lambda: ai.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=1))
        after = e and e.response.headers.get("retry-after")
        check("a full queue: RateLimitError with retry-after", e and (e.status_code, e.code) == (429, "queue_full") and after and int(after) >= 1, e and (e.code, after))
        check("a client that tries again gets in", patient.chat.completions.create(model=MODEL, messages=ASKED, temperature=0).choices[0].message.content == VERSE)
        for s in streams:
            s.close()


def keys(binary):
    with Server(binary, keys=["right", "other"]) as server:
        e = raised(openai.AuthenticationError, lambda: client(server, "wrong").models.list())
        check("a wrong key: AuthenticationError", e and (e.status_code, e.code) == (401, "invalid_api_key"), e and (e.code, e.message))
        e = raised(openai.AuthenticationError, lambda: client(server, "wrong").chat.completions.create(model=MODEL, messages=ASKED))
        check("no answer with it either", e and e.status_code == 401)
        for key in ("right", "other"):
            check("a right key", client(server, key).chat.completions.create(model=MODEL, messages=ASKED, temperature=0).choices[0].message.content == VERSE)


binary = script(__doc__)
print(f"openai {openai.__version__}")
with Server(binary) as server:
    ai = client(server)
    for part in (chats, models, errors):
        with check.part(part.__name__):
            part(ai)
    with check.part("left"):
        left(server, ai)
    check("no panic", not server.panicked())
for part in (full, keys):
    with check.part(part.__name__):
        part(binary)
check.exit()
