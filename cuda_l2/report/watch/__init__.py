"""Follows a running search, training or table by its files, as a local page or in a terminal."""
