from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage

pipe = Pipeline()
pipe.add_component(
    "prompt",
    ChatPromptBuilder(template=[ChatMessage.from_user("Tell me about {{ location }}")], required_variables="*"),
)
pipe.add_component("llm", OpenAIChatGenerator(model="gpt-4o-mini", generation_kwargs={"n": 2}))
pipe.connect("prompt.prompt", "llm.messages")
result = pipe.run({"prompt": {"location": "Berlin"}})
print(result)
