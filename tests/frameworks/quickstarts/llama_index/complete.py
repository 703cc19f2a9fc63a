from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI

llm = OpenAI(model="gpt-4o-mini")
print(llm.complete("Paul Graham is "))
for chunk in llm.stream_chat(
    [ChatMessage(role="system", content="You are a pirate"), ChatMessage(role="user", content="Who?")]
):
    print(chunk.delta, end="")
