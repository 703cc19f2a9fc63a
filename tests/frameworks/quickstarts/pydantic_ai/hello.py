from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-5.2", instructions="Be concise, reply with one sentence.")
result = agent.run_sync('Where does "hello world" come from?')
print(result.output)
