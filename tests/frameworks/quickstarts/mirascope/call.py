from mirascope import llm


@llm.call("openai/gpt-4o-mini")
def recommend(genre: str):
    return f"Recommend a {genre} book."


print(recommend("fantasy").text())
