"""The error for a model that cannot be loaded."""


class ModelError(ValueError):
    """A model could not be loaded; the message says what to do.

    Example:
        >>> try:
        ...     model = tlc.load_model("./no-such-folder")
        ... except tlc.ModelError as error:
        ...     print(str(error)[:32])
        could not load './no-such-folder
    """
