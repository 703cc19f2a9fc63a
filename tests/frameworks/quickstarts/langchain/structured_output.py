from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke")
    punchline: str = Field(description="The punchline to the joke")


llm = ChatOpenAI(model="gpt-4o-mini")
for method in ("json_schema", "function_calling", "json_mode"):
    joke = llm.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats, as JSON")
    assert isinstance(joke, Joke), joke
    print(joke)
