"""Retrieval: pieces of the headers installed on this machine and of the user's own code, for prompts."""
