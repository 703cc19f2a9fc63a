from agno.agent import Agent
from agno.models.openai import OpenAIChat

agent = Agent(model=OpenAIChat(id="gpt-5-mini"), markdown=True)
agent.print_response("What is the capital of France?", stream=True)
print(agent.run("Again").content)
