import dspy

lm = dspy.LM("openai/gpt-5-mini", cache=False)
dspy.configure(lm=lm)
math = dspy.ChainOfThought("question -> answer: float")
result = math(question="Two dice are tossed. What is the probability that the sum equals two?")
assert result.answer == 12.0
print(result)
