"""Faults of an environment, in the form that both sides of the process boundary use."""

import re


class EnvironmentFault(Exception):
    """Environment code failed, or could not be given what it needs.

    `code` is one of:
    - environment_invalid: it does not load, or it breaks the contract
    - dataset_invalid
    - environment_error: a call failed
    - environment_timeout: a call passed its deadline
    - invalid_argument: settings.toml cannot be used
    - network_not_granted: its environment.toml asks for it, settings.toml does not grant it
    - environments_busy: as many environments run as settings.toml allows
    - environment_unprotected: no file protection is possible, and settings.toml insists on it
    - environment_memory, _file_size, _processes, _network, _access: the sandbox refused something
    - requirements_failed: its packages could not be installed
    - not_ready: its packages are still being installed

    `traceback` is the evidence. It may be empty."""

    def __init__(self, code: str, what: str, traceback: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.traceback = traceback


FIXES = {
    "network_not_granted": "if the operator trusts its code with the network, add that name to "
    "`network` under [environments] in settings.toml of FLASH_HOME; or take `network` out of its "
    "environment.toml",
    "environments_busy": "call again when one of them has ended; the operator allows more with "
    "`at_once` or `at_once_per_owner` under [environments] in settings.toml of FLASH_HOME",
    "environment_unprotected": "use a kernel with Landlock (5.13 or newer), which a container may "
    "have to allow; or, for code that you trust with every file of this user, set "
    "`without_file_protection = true` under [environments] in settings.toml of FLASH_HOME",
    "invalid_argument": "whoever runs the server corrects settings.toml in FLASH_HOME",
}
"""For faults that only the operator of the machine can remove."""

ARGUMENT_ERROR = re.compile(
    r"raised TypeError: ((?:\w+\.__init__|load_environment)\(\)) "
    r"(got an unexpected|missing).* arguments?:? ('\w+')"
)


OFF_MAIN_THREAD = re.compile(
    r"^(\w+) raised (?:ValueError|RuntimeError): .*\b(?:in|from) (?:the )?main thread"
)
"""What `signal` says, and what libraries say that use it for their time limits."""


NLTK_DATA = re.compile(r"raised LookupError: .*nltk\.download\('([\w-]+)'\)", re.DOTALL)
IS_NO_NUMBER = "which is no number"


def remedy(fault: EnvironmentFault) -> str | None:
    """The fix of a fault that wrong secrets, wrong environment_args or a call on the wrong thread
    caused. None for other faults.
    """
    if called := OFF_MAIN_THREAD.match(fault.what):
        if called[1] == "score_episode":
            what = "set max_score_concurrency = 1 on the environment"
            return f"{what}: score_episode then runs on the main thread, one call at a time"
        what = "only load_environment and, with max_score_concurrency = 1, score_episode run on it"
        return f"do this in score_episode, or turn off the time limit of that library: {what}"
    if data := NLTK_DATA.search(fault.what):
        return (
            f"download it into the folder with `python -m nltk.downloader -d nltk_data {data[1]}`, "
            "and call nltk.data.path.append(str(Path(__file__).parent / 'nltk_data')) before use"
        )
    if IS_NO_NUMBER in fault.what:
        return "wrap the object that the environment plays, so that its step returns a number"
    is_load = fault.code == "environment_invalid"
    key = re.search(r"raised KeyError: '([A-Z][A-Z0-9_]+)'", fault.what)
    # After loading, a dict of the environment's own may have lacked such a key, too.
    if key and (is_load or re.search(r"\benviron\b", fault.traceback)):
        condition = "if that is an environment variable of the server"
        why = "the environment's process sees only those named there"
        return f"pass secrets=[{key[1]!r}], {condition}: {why}"
    arguments = ARGUMENT_ERROR.search(fault.what)
    if not (is_load and arguments):
        return None
    callee, trouble, name = arguments.groups()
    if trouble == "missing":
        default = f"give that parameter of {callee} a default"
        return f"pass environment_args={{{name}: ...}}, or {default}"
    return f"leave {name} out of environment_args, or add it to the parameters of {callee}"
