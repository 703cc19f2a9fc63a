"""Sealed exams: environments that the agent is judged by and never sees (docs/exam.md)."""
