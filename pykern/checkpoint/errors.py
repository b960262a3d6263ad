"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written as asked, or a file is not a checkpoint of this model.

    When this error is raised, the former file, the model and the optimizer are unchanged.
    """
