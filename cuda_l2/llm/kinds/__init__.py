"""Kinds of language models, one file each, named by the word before the colon of --policy."""
