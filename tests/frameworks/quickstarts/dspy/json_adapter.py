import dspy

lm = dspy.LM("openai/gpt-4o-mini", cache=False, temperature=0.5, max_tokens=300)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class ExtractInfo(dspy.Signature):
    """Extract structured information from text."""

    text: str = dspy.InputField()
    title: str = dspy.OutputField()
    headings: list[str] = dspy.OutputField()


response = dspy.Predict(ExtractInfo)(text="Apple announced its latest iPhone 14 today.")
assert isinstance(response.headings, list)
print(response)
