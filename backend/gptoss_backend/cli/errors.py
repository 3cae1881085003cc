class CommandFailed(RuntimeError):
    """A command could not do what it was asked: the message is what the user reads."""
