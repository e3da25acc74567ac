"""Bad input ends a run with one line that names the flag or file and the fix."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message names the flag or file and the fix."""


class CompressionConfigError(InputError):
    """A compression setting that cannot be honoured; the message names the flag and the fix."""
