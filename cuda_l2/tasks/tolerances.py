"""Tolerances that verification and the checks of timed outputs share."""

SUMMATION_NOISE = 2.0**-20
"""What the order of fp32 sums of K products of order one may move C by, over sqrt(K); matters where C is near zero."""
