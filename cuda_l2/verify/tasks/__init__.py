"""Checks of candidates for tasks other than matrix products, one file each with a CHECK."""
