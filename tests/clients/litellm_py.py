"""litellm_py.py URL: one round of litellm against the server at URL, which serves glm5-nano without keys."""
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-ups elsewhere
import importlib.metadata

import litellm

from common import MODEL, Checks, at_rest, script

check = Checks()
url = script(__doc__, own=False)
VERSE = "If ye know these things, happy are ye if ye do them."
ask = {"model": f"openai/{MODEL}", "api_base": url + "/v1", "api_key": "none", "messages": [{"role": "user", "content": "John 13:17"}],
       "num_retries": 0, "max_retries": 0}
print(f"litellm {importlib.metadata.version('litellm')}")

with check.part("chat"):
    whole = litellm.completion(**ask, temperature=0)
    check("whole", whole.choices[0].message.content == VERSE and whole.choices[0].finish_reason == "stop", whole.choices[0].message.content)
    check("usage", (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 17))
    frames = list(litellm.completion(**ask, temperature=0, stream=True, stream_options={"include_usage": True}))
    check("streamed", "".join(c.delta.content or "" for f in frames for c in f.choices) == VERSE)
    check("its usage", any(getattr(f, "usage", None) and f.usage.total_tokens == 27 for f in frames))
    rebuilt = litellm.stream_chunk_builder(frames)
    check("rebuilt from its frames", rebuilt.choices[0].message.content == VERSE)
    two = litellm.completion(**ask, n=2, seed=1, max_tokens=8)
    check("n=2", len(two.choices) == 2)
    told = litellm.completion(**ask, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    check("logprobs", all(t.logprob == t.top_logprobs[0].logprob for t in told) and "".join(t.token for t in told) == VERSE)
    check("a stop string", litellm.completion(**ask, temperature=0, stop=["happy"]).choices[0].message.content == "If ye know these things, ")
    plain = litellm.text_completion(model=f"text-completion-openai/{MODEL}", api_base=url + "/v1", api_key="none", prompt="In the beginning God", max_tokens=6, temperature=0)
    check("a plain completion", plain.choices[0].text.startswith(" "), plain.choices[0].text)
for name, kind, more in [("an unknown model", litellm.NotFoundError, {"model": "openai/gpt-none"}),
                         ("over the context", litellm.ContextWindowExceededError, {"max_tokens": 384}),
                         ("temperature 3", litellm.BadRequestError, {"temperature": 3})]:
    try:
        litellm.completion(**{**ask, **more})
        found = None
    except Exception as e:
        found = e
    check(f"{name}: {kind.__name__}", isinstance(found, kind), f"{type(found).__name__} {str(found)[:160]}")
with check.part("left"):
    stream = litellm.completion(**ask, stream=True, max_tokens=360, extra_body={"ignore_eos": True})
    for _, frame in zip(range(4), stream):
        pass
    closed = getattr(stream.completion_stream, "close", None) or stream.completion_stream.response.close
    closed()
    took = at_rest(url, 3)
    check("a stream that is left frees its pages within 1 s", took is not None and took < 1, took)
check.exit()
