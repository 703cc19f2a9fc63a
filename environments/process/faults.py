"""What goes wrong with an environment, as every side of the process boundary says it."""

import re


class EnvironmentFault(Exception):
    """Environment code failed, or could not be given what it needs.

    `code` is environment_invalid (it does not load or breaks the contract), dataset_invalid,
    environment_error (a call failed), environment_timeout (a call passed its deadline),
    environment_memory, _file_size, _processes, _network or _access (it met a wall of
    environments.process.sandbox), requirements_failed (its packages could not be installed) or
    not_ready (they are still being installed); `traceback` is the evidence, possibly empty."""

    def __init__(self, code: str, what: str, traceback: str = "") -> None:
        super().__init__(what)
        self.code, self.what, self.traceback = code, what, traceback


def remedy(fault: EnvironmentFault) -> str | None:
    """What mends a fault that lies in how the environment was called: secrets or environment_args.
    None for others.
    """
    is_load = fault.code == "environment_invalid"
    key = re.search(r"raised KeyError: '([A-Z][A-Z0-9_]+)'", fault.what)
    if key and (
        is_load or re.search(r"\benviron\b", fault.traceback)
    ):  # a dict of its own may have such keys, too
        return (
            f"pass secrets=[{key[1]!r}], if that is an environment variable of the server: the environment's process "
            "sees only those named there"
        )
    arguments = re.search(
        r"raised TypeError: ((?:\w+\.__init__|load_environment)\(\)) (got an unexpected|missing).* arguments?:? "
        r"('\w+')",
        fault.what,
    )
    if not (is_load and arguments):
        return None
    callee, trouble, name = arguments.groups()
    if trouble == "missing":
        return (
            f"pass environment_args={{{name}: ...}}, or give that parameter of {callee} a default"
        )
    return f"leave {name} out of environment_args, or add it to the parameters of {callee}"
