from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def letter_counter(word: str, letter: str) -> int:
    """Count occurrences of a letter in a word.

    Args:
        word: the word
        letter: the letter
    """
    return word.lower().count(letter.lower())


model = OpenAIModel(model_id="gpt-4o", params={"max_tokens": 300, "temperature": 0.7})
agent = Agent(model=model, tools=[letter_counter])
print(agent("How many r in strawberry?"))
