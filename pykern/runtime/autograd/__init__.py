"""Where graphs are cut, and backwards in two parts."""
