"""The commands, one room for each kind of work."""
