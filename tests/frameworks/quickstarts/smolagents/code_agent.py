from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel(model_id="gpt-4o")
agent = CodeAgent(tools=[], model=model, add_base_tools=False)
print(agent.run("Could you give me the 118th number in the Fibonacci sequence?"))
