"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written as asked, or a file is none, or is not of this model.

    Nothing has been changed when it is raised: neither the file that was there before, nor the
    model, nor the optimizer.
    """
