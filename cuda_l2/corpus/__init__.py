"""Training text from installed code and the user's own: cut, cleaned, deduplicated, with instructions."""
