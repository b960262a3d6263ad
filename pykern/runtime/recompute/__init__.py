"""What a forward keeps for its backward, and computes again."""
