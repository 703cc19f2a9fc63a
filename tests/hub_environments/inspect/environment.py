"""Tasks of inspect-evals by name: some whose data is in the package, and some that need what cannot
run here."""

from importlib import import_module

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample

NAMES = [
    "agent_threat_bench.agent_threat_bench_memory_poison",
    "agent_threat_bench.agent_threat_bench_autonomy_hijack",
    "agent_threat_bench.agent_threat_bench_data_exfil",
    "gsm8k.gsm8k",
    "humaneval.humaneval",
    "agent_bench.agent_bench_os",
]


def load_environment(name=""):
    if name:
        module, _, function = name.partition(".")
        return getattr(import_module(f"inspect_evals.{module}"), function)()
    environment = GymEnvironment(lambda seed: None, max_turns=1)
    environment.dataset = [TaskExample({}, each, id=each) for each in NAMES]
    return environment
