"""A taskset of sums, whose answers reasoning-gym checks."""

import reasoning_gym
import verifiers.v1 as vf

CONFIG = {"seed": 0, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    size: int = 500


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for item in reasoning_gym.create_dataset("chain_sum", size=self.config.size, **CONFIG):
            data = SumData(
                prompt=item["question"], system_prompt="Write the answer, and nothing else.", answer=item["answer"]
            )
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
