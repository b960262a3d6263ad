"""A stage: consecutive layers of the model, and the work of its actions."""
