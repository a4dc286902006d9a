"""Training text: code that is installed here and the user's own, cut, cleaned, deduplicated, with instructions."""
