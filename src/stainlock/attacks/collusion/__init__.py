"""Collusion: ways for clients to merge their copies into one file, one Python file each."""
