"""A stage: the layers of one place, and what an action does with them."""
