"""What a model is given to read: pieces of the headers installed on this machine and of the user's own code."""
