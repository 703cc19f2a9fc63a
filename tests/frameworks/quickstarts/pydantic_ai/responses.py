from pydantic_ai import Agent

agent = Agent("openai-responses:gpt-5.2", instructions="Be concise, reply with one sentence.")
result = agent.run_sync('Where does "hello world" come from?')
print(agent.run_sync("And who wrote it?", message_history=result.all_messages()).output)
