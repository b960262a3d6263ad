"""Other libraries' names and formats over pykern's runtime."""
