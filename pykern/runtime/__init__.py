"""What an action does to tensors, and how a step runs all of them. It knows no schedule by name."""
