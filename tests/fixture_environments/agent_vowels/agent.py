"""An agent that knows nothing of training: it asks any OpenAI-compatible API, twice."""

from openai import OpenAI


def write(question: str, base_url: str, api_key: str, model: str) -> list[str]:
    messages = [{"role": "user", "content": question}]
    texts = []
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = client.chat.completions.create(model=model, messages=messages)
            message = answer.choices[0].message
            texts.append(message.content or "")
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    return texts
