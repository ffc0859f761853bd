"""Collusion: clients who lay their copies side by side and make one file of them. One file for each way to do it."""
