from smolagents import CodeAgent, LiteLLMModel

model = LiteLLMModel(model_id="openai/gpt-4o", temperature=0.2, max_tokens=500)
print(CodeAgent(tools=[], model=model, stream_outputs=True).run("What is 2 to the power of 3.7384?"))
