"""What goes wrong with an environment, as every side of the process boundary says it."""


class EnvironmentFault(Exception):
    """Environment code failed, or could not be given what it needs.

    `code` is environment_invalid (it does not load or breaks the contract), dataset_invalid, environment_error (a call
    failed), environment_timeout (a call passed its deadline), requirements_failed (its packages could not be
    installed) or not_ready (they are still being installed); `traceback` is the evidence, possibly empty.
    """

    def __init__(self, code: str, what: str, traceback: str = "") -> None:
        super().__init__(what)
        self.code, self.what, self.traceback = code, what, traceback
