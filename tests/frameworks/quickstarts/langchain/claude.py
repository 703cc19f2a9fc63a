from langchain_anthropic import ChatAnthropic
from pydantic import BaseModel


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str


model = ChatAnthropic(model="claude-haiku-4-5", temperature=0, stop=["END"])
print(model.invoke("Tell me a joke.").content)
said = model.bind_tools([GetWeather], tool_choice="any").invoke("Is it hotter in LA or NY?")
assert said.tool_calls[0]["name"] == "GetWeather"
print("".join(str(chunk.text) for chunk in model.stream("Tell me a joke.")))
