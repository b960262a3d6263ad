"""How the processes of a pipeline find, tell and check each other."""
