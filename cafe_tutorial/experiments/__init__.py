"""Measurements as commands: each module's ``run`` returns what its JSON file holds."""
