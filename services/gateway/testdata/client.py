"""Use a gateway with OpenAI's client, unmodified. Arguments: base URL, API key. Prints a JSON object."""

import json
import sys

import openai


def main() -> None:
    url, key = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    models = client.models.list()
    one = client.models.retrieve("tiny")
    hello = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=hello, n=2, temperature=0.5, top_p=0.9, seed=7, max_completion_tokens=9, stop=["x"], logprobs=True
    )
    chunks = list(
        client.chat.completions.create(model="tiny", messages=hello, stream=True, stream_options={"include_usage": True})
    )
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=hello)
    texts = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
    echoed = client.completions.create(model="tiny", prompt=["ab", "cd"], echo=True, logprobs=1, n=2)
    scored_prompt = client.completions.create(model="tiny", prompt=[7, 8], extra_body={"prompt_logprobs": 1})
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], stream=True)
    streamed = "".join(c.choices[0].text for c in ids if c.choices)
    errors = {}
    for name, call in {
        "unknown model": lambda: client.chat.completions.create(model="gpt-4", messages=hello),
        "bad role": lambda: client.chat.completions.create(model="tiny", messages=[{"role": "robot", "content": "x"}]),
        "negative temperature": lambda: client.chat.completions.create(model="tiny", messages=hello, temperature=-1),
        "context overflow": lambda: client.chat.completions.create(model="tiny", messages=hello, max_tokens=1000),
        "suffix": lambda: client.completions.create(model="tiny", prompt="a", suffix="b"),
        "wrong key": lambda: client.with_options(api_key="wrong").models.list(),
    }.items():
        try:
            call()
        except openai.APIStatusError as e:
            errors[name] = f"{type(e).__name__} {e.status_code} {e.code}"
    scored = chat.choices[0].logprobs.content
    print(
        json.dumps(
            {
                "models": [m.id for m in models],
                "one": one.id,
                "chat": [c.message.content for c in chat.choices],
                "finish": chat.choices[0].finish_reason,
                "logprobs": [[t.token, t.logprob] for t in scored],
                "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens],
                "fingerprint": chat.system_fingerprint,
                "deltas": [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content],
                "stream usage": chunks[-1].usage.total_tokens,
                "version": raw.headers["x-rollout-weights-version"],
                "texts": [c.text for c in texts.choices],
                "echoed": [c.text for c in echoed.choices],
                "echoed logprobs": echoed.choices[2].logprobs.model_dump(),
                "prompt logprobs": [scored_prompt.choices[0].text, scored_prompt.choices[0].prompt_logprobs],
                "streamed": streamed,
                "errors": errors,
            }
        )
    )


if __name__ == "__main__":
    main()
