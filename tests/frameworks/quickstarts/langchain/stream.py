from langchain_openai import ChatOpenAI

llm = ChatOpenAI(model="gpt-4o", temperature=0, max_tokens=100, timeout=60, max_retries=2)
chunks = [chunk.text for chunk in llm.stream("Write me a song about sparkling water.")]
assert "".join(chunks)
print("".join(chunks))
