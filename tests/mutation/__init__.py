"""Mutations of good kernels: does the verifier notice small faults?"""
